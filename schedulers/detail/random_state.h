// The state of LibTorch's default random generators: the CPU's and, for a model on a GPU, that device's.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer::detail {

struct RandomState {
  at::Tensor cpu;   // uint8
  at::Tensor cuda;  // uint8 on the CPU; undefined for a model on the CPU
};

RandomState get_random_state(at::Device device);
// Throws InvalidArgument, changing nothing, where a state does not fit this generator.
void set_random_state(at::Device device, const RandomState& state);

}  // namespace pacer::detail
