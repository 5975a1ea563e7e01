// What the textbook's 1-bit optimizers share: parameters as one row of elements, and the mean over ranks of
// such a row that travels as signs (Tang et al., arXiv:2102.02888). Written with LibTorch's tensors, to read
// beside the definition and to try what pacer does not have: the elements that share a scale are a table.
// Nothing is saved: signs travel multiplied out, as floats, and every rank keeps the errors of all servers.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/collectives/communicator.h>

#include "options.h"

namespace scales {

using Tensors = std::vector<at::Tensor>;

// Of all groups.
Tensors parameters_of(const torch::optim::Optimizer& optimizer);
// float (elements), one parameter after the other; all must have a gradient.
at::Tensor gradients_of(const Tensors& parameters);
// The parts of a row, in the shapes of the parameters; they share its memory.
Tensors views_of(const at::Tensor& row, const Tensors& parameters);
// 1 - beta^t.
double correction(double beta, int64_t t);
// No element below this share of its tensor's mean, or of the whole row's where that is 0.
at::Tensor raise_to_floor(const at::Tensor& variance, const Tensors& parameters, double share);

// Which scale each element has.
struct ScaleTable {
  at::Tensor scale_of;  // int64 (elements)
  at::Tensor elements;  // float (scales): how many have this scale, at least 1

  // Each element's sign, + where it is 0, times the root mean square of those that share its scale.
  at::Tensor round_to_signs(const at::Tensor& values) const;
};

class OneBitMean {
 public:
  OneBitMean(const Tensors& parameters, std::shared_ptr<pacer::Communicator> world, ScaleUnit unit);

  at::Tensor in_full_precision(const at::Tensor& row) const;
  // As signs; what rounding loses is added to the next call's.
  at::Tensor as_signs(const at::Tensor& row);

 private:
  std::shared_ptr<pacer::Communicator> world_;
  ScaleTable worker_, server_;
  at::Tensor worker_error_, server_error_;  // float (elements)
};

}  // namespace scales
