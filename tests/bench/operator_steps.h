// AdamW steps written with LibTorch's operators, as its Python optimizers call them. Any device.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "contenders.h"

namespace bench {

// The same for every contender.
struct AdamWSettings {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};
constexpr AdamWSettings kSettings;

// Copies of the initial parameters, for one contender.
std::vector<at::Tensor> own_parameters(const ModelData& data);

Contender make_fused(const ModelData& data);
Contender make_checked_fused(const ModelData& data);
// fp32 masters and moments behind bf16 parameters; with `upcast` the step also converts the gradients to
// fp32.
Contender make_fused_master(const ModelData& data, bool upcast);
Contender make_foreach(const ModelData& data);
Contender make_foreach_norm(const ModelData& data);

}  // namespace bench
