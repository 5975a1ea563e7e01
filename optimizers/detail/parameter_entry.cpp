#include <pacer/optimizers/detail/parameter_entry.h>

#include <type_traits>

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/remainder_values.h>

namespace pacer::detail {
namespace {

using kernels::AdamStorage;
using kernels::GradientType;

}  // namespace

void ParameterEntry::lay_out() {
  dense_parameter = at::Tensor();
  memory = range.values;
  if (memory.defined()) return;
  if (!parameter.is_non_overlapping_and_dense()) {
    dense_parameter = at::empty(parameter.sizes(), parameter.options().requires_grad(false));
  }
  memory = !range.is_part() ? dense()
                            : dense().as_strided({range.count}, {1}, dense().storage_offset() + range.first);
}

const void* ParameterEntry::in_range(const at::Tensor& tensor) const {
  if (!tensor.defined()) return nullptr;
  return static_cast<const char*>(tensor.const_data_ptr()) +
         range.first * static_cast<int64_t>(tensor.element_size());
}

std::vector<int64_t> dense_strides(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense()
             ? parameter.strides().vec()
             : at::IntArrayRef(c10::contiguous_strides(parameter.sizes())).vec();
}

GradientType gradient_type(AdamStorage storage) {
  return kernels::with_storage(storage, [](auto chosen) {
    using Param = typename kernels::StorageOf<chosen()>::Param;
    return std::is_same_v<Param, double>             ? GradientType::f64
           : std::is_same_v<Param, float>            ? GradientType::f32
           : std::is_same_v<Param, kernels::Float16> ? GradientType::f16
                                                     : GradientType::bf16;
  });
}

void* pointer_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

bool needs_dense_gradient(const ParameterEntry& entry, const at::Tensor& gradient) {
  return !same_layout(gradient, entry.dense()) || gradient.is_neg() || gradient._is_zerotensor();
}

void check_state(const FusedAdamStateFields& state, at::IntArrayRef parameter, std::optional<int64_t> part,
                 const std::string& name) {
  const at::IntArrayRef sizes = part ? at::IntArrayRef(*part) : parameter;
  for (const StateField& field : kStateFields) {
    const at::Tensor& tensor = (state.*field.read)();
    if (!tensor.defined()) continue;
    if (field.kind == StateKind::trust_average) {
      require(tensor.scalar_type() == at::kDouble && tensor.sizes() == at::IntArrayRef{2},
              "the state of parameter ", InMessage{name, sizes},
              " has a trust_average that is not two fp64 numbers");
      continue;
    }
    const std::vector<int64_t> needed =
        field_sizes(field.kind, field.kind == StateKind::row_moment ? parameter : sizes);
    require(tensor.sizes() == at::IntArrayRef(needed), "the state of parameter ", InMessage{name}, " has ",
            field.name, " of shape ", tensor.sizes(), " but the parameter has ", sizes);
    if (is_coded(field.kind) && tensor.scalar_type() == codes_dtype(field.kind)) {
      const bool is_whole =
          (state.*scale_field(field.kind).read)().defined() && tensor.is_non_overlapping_and_dense();
      require(is_whole || state.step() == 0, "the state of parameter ", InMessage{name, sizes},
              " has codes of ", field.name, ", but not their scales, or not in one dense piece of memory");
      continue;
    }
    const bool integer = field.kind == StateKind::remainder;
    const bool right_kind = integer                ? is_remainder_dtype(tensor.scalar_type())
                            : is_scale(field.kind) ? tensor.scalar_type() == at::kHalf
                                                   : tensor.is_floating_point();
    require(right_kind && tensor.layout() == at::kStrided, "the state of parameter ", InMessage{name, sizes},
            " has ", field.name, " of dtype ", tensor.scalar_type(), " and layout ", tensor.layout(),
            "; it must be ", integer ? "int16 or int8" : "floating point", " and dense");
  }
}

}  // namespace pacer::detail
