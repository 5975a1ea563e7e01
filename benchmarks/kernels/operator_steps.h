// Steps of AdamW written with LibTorch's operators, as its Python optimizers call them, and of LAMB, on any
// device.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "contenders.h"
#include "support/fused_adamw.h"

namespace bench::kernels {

// The same for every contender.
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

// LAMB, which LibTorch does not have: one tensor after the other, and all tensors in each operator.
Contender make_lamb_loop(const ModelData& data);
Contender make_lamb_foreach(const ModelData& data);

}  // namespace bench::kernels
