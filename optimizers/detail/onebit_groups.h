// What the 1-bit optimizers ask of its parameter groups.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

using OptimizerGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Throws InvalidArgument where a parameter of a compressed group cannot be compressed.
void check_compressible(const char* optimizer, const OptimizerGroups& groups, const ParameterNames& names);

// Of the first parameter; the CPU where there is none.
at::Device device_of(const OptimizerGroups& groups);

// The second beta of the first compressed group, 0.999 where there is none.
double first_beta2(const AdamFlavour& flavour, const OptimizerGroups& groups);

std::vector<AdamGroupSettings> settings_of(const AdamFlavour& flavour, const OptimizerGroups& groups);

// Those that are not compressed, with copies of their options as they are now.
OptimizerGroups full_precision_groups(const OptimizerGroups& groups);

// The L1 norm of the bias-corrected variance of all entries, added up in their order.
double variance_norm(const std::vector<AdamEntry>& entries, const std::vector<AdamGroupSettings>& settings);

}  // namespace pacer::detail
