// How the examples that compare two optimizers train the byte model: by all ranks together, in a Session with
// clipping and a warm-up, and with one line at the end that says the loss and the bytes sent.
#pragma once

#include <cstdint>
#include <memory>

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace examples {

struct ByteTraining {
  torch::Tensor windows;  // of read_windows
  int64_t batch;          // windows in a step, of all ranks together: a multiple of the number of ranks
  int64_t steps;
  std::shared_ptr<pacer::Communicator> world;

  // Trains `model`, whose parameters `optimizer` has. Rank 0 prints a line that begins with `name`: the mean
  // loss in nats per byte over the last tenth of the steps, and the megabytes that a rank sent.
  void run(const char* name, torch::nn::Sequential model, torch::optim::Optimizer& optimizer) const;

  // Rank 0 prints how long the warm-up of `optimizer` was, and what a rank sent after it.
  void print_phases(const char* name, const pacer::OneBitOptimizer& optimizer) const;
};

}  // namespace examples
