// How long the optimizers' kernels take: the bytes of device memory that they move for each parameter, each
// stream once, over the share of a copy's bandwidth that they reach.
#pragma once

#include "step_time.h"

namespace scaling {

class Kernels {
 public:
  Kernels(const Workload& work, const Machine& machine);

  // Seconds of one rank. The update of all parameters.
  double update() const;
  // fp32 gradients to bf16 and back.
  double casts() const;
  // Gradients of a node's ranks added in rank order, LibTorch's operations beside an all-to-all and an
  // all-gather.
  double node_sums(double per_node) const;
  // All of a compressed step: norm, worker, server of a chunk of one of `workers`, update.
  double compressed(double workers) const;

 private:
  double seconds(double bytes_per_parameter, double share) const;

  const Workload& work_;
  const Machine& machine_;
};

}  // namespace scaling
