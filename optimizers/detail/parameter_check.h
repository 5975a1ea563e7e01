// What a fused optimizer asks of parameters and gradients, checked before anything is written. Every failure
// is an InvalidArgument that names the parameter.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/detail/optimizer_view.h>

namespace pacer::detail {

// Every parameter is a strided CPU or CUDA tensor of fp64, fp32, bf16 or fp16 that does not overlap itself,
// none is given twice, all are on one device.
void check_groups(const ParamGroups& groups, const TensorNames& names);

// No two parameters have one name.
void check_names(const ParamGroups& groups, const TensorNames& names);

// Parameters of groups that a 1-bit optimizer compresses are neither fp64 nor have gaps.
void check_compressible(const char* optimizer, const ParamGroups& groups,
                        const std::vector<GroupSettings>& settings, const TensorNames& names);

// Parameters of groups that Muon orthogonalises are matrices: of two dimensions or more, not empty, with rows
// that the group's split divides.
void check_matrices(const char* optimizer, const ParamGroups& groups,
                    const std::vector<GroupSettings>& settings, const TensorNames& names);

// Dense, and of the parameter's shape, dtype and device.
void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient, const std::string& name);

// The dtype set for a parameter; throws where the options do not fit its dtype.
kernels::AdamStorage storage_for(at::ScalarType dtype, MasterWeights master_weights, Rounding rounding,
                                 const std::string& name);

// A piece of memory a parameter is written through or its gradient is read through.
struct MemoryRange {
  const char* begin;
  const char* end;
  size_t parameter;  // position in the optimizer
  bool written;
};

// The bytes between the first and the last element; empty for an empty tensor.
MemoryRange memory_range(const at::Tensor& tensor, size_t parameter, bool written);

// No written range touches a range of another parameter. Reorders `ranges`. `names[i]`: name of parameter i.
void check_disjoint(std::vector<MemoryRange>& ranges, const std::vector<std::string>& names);

}  // namespace pacer::detail
