#include <pacer/optimizers/detail/state_rows.h>

#include <vector>

#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <pacer/optimizers/detail/moment_codes.h>
#include <pacer/optimizers/detail/state_fields.h>

namespace pacer::detail {
namespace {

using at::Tensor;

// A flag for each row beside a tensor of those rows.
Tensor beside(const Tensor& flags, const Tensor& tensor) {
  std::vector<int64_t> sizes(static_cast<size_t>(tensor.dim()), 1);
  sizes.front() = flags.numel();
  return flags.to(tensor.device()).view(sizes);
}

// The rows of a tensor, zeros where there is none.
Tensor rows_of(const Tensor& tensor, const Tensor& rows) {
  if (tensor.size(0) == 0) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes.front() = rows.numel();
    return at::zeros(sizes, tensor.options());
  }
  const Tensor place = rows.to(tensor.device());
  return tensor.index_select(0, place.clamp_min(0)).masked_fill_(beside(place.lt(0), tensor), 0);
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerParamState> state_of_rows(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state, const Tensor& before,
    const Tensor& after, const Tensor& rows) {
  auto made = state.clone();
  auto& fields = dynamic_cast<FusedAdamStateFields&>(*made);
  const Tensor is_new = rows.lt(0);
  // Where the parameter is not what it was; what is not a number is not even itself.
  const Tensor differs = after.ne(rows_of(before, rows)).logical_or_(beside(is_new, after));
  for (const StateField& field : kStateFields) {
    Tensor& tensor = (fields.*field.get)();
    if (!tensor.defined() || is_scale(field.kind) || field.kind == StateKind::trust_average) continue;
    Tensor values = tensor;
    if (is_coded(field.kind) && are_codes(tensor)) {
      Tensor& scales = (fields.*scale_field(field.kind).get)();
      values = decoded(field, tensor, scales);
      scales = Tensor();
    }
    values = rows_of(values, rows);
    const auto of_parameter = [&] { return after.to(values.options()); };
    if (field.kind == StateKind::master) {
      values = at::where(differs.to(values.device()), of_parameter(), values);
    } else if (field.kind == StateKind::remainder) {
      values.masked_fill_(differs.to(values.device()), 0);
    } else if (field.kind == StateKind::moment && traits.averages) {  // z, which begins at the parameter
      values = at::where(beside(is_new, values), of_parameter(), values);
    }
    tensor = values;
  }
  return made;
}

}  // namespace pacer::detail
