// Moments in 8 bits as tensors: codes in the shape and memory order of a parameter, and their scales, a vector in that
// order. Here they become numbers and the other way round, for loads and for a change of format; steps do that in
// their kernels. It happens on the CPU, wherever the tensors are.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/detail/state_memory.h>

namespace pacer::detail {

inline bool are_codes(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kChar || tensor.scalar_type() == at::kByte);
}

// Returns the fp32 values of the field's codes, on the codes' device and in their layout.
at::Tensor decoded(const StateField& field, const at::Tensor& codes, const at::Tensor& scales);

// Gives the entry codes of the values that it has in the field.
void encode_field(ParameterEntry& entry, const StateField& field, StateMemory& memory);

// Leaves codes only where the entries want them as they are: in all other places fp32 values take their place.
void decode_unfit(std::vector<ParameterEntry>& entries, const StateMemory& memory);

// Makes the scales that are missing, which are zeros, and brings all to their parameters' device.
void prepare_scales(std::vector<ParameterEntry>& entries);

// Cuts codes and their scales to a range of the parameter, as cut_to_range does, which for codes begins at a multiple of
// their group. Values take the place of codes where it does not.
void cut_codes(FusedAdamStateFields& state, const StateField& field, const ParameterRange& range);

}  // namespace pacer::detail
