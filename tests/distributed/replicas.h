// Whether ranks have the same model.
#pragma once

#include <string>

#include <torch/nn/module.h>

#include <pacer/collectives/communicator.h>

#include "scenario.h"

namespace pacer::testing {

// Throws Error unless this rank's parameters have the bits of rank 0's.
inline void expect_replicas(Communicator& world, const torch::nn::Module& model, const std::string& what) {
  for (const at::Tensor& parameter : model.parameters()) {
    const at::Tensor own = parameter.detach().cpu().contiguous();
    const std::string bytes(static_cast<const char*>(own.const_data_ptr()), own.nbytes());
    expect(world.exchange(bytes).front() == bytes, what, ": the bits of rank 0");
  }
}

}  // namespace pacer::testing
