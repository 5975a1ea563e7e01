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

// Gives `change(field, values)` each tensor of a copy of the state that has the parameter's rows, and puts what that
// returns in its place. Codes come as numbers.
template <class Change>
std::unique_ptr<torch::optim::OptimizerParamState> with_rows_changed(
    const torch::optim::OptimizerParamState& state, const Change& change) {
  auto made = state.clone();
  auto& fields = dynamic_cast<FusedAdamStateFields&>(*made);
  for (const StateField& field : kStateFields) {
    Tensor& tensor = (fields.*field.get)();
    if (!tensor.defined() || is_scale(field.kind) || field.kind == StateKind::trust_average) continue;
    Tensor values = tensor;
    if (is_coded(field.kind) && are_codes(tensor)) {
      Tensor& scales = (fields.*scale_field(field.kind).get)();
      values = decoded(field, tensor, scales);
      scales = Tensor();
    }
    tensor = change(field, values);
  }
  return made;
}

// The z of an average, which begins at the parameter.
bool is_average(const OptimizerTraits& traits, const StateField& field) {
  return field.kind == StateKind::moment && traits.averages;
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerParamState> state_of_rows(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state, const Tensor& before,
    const Tensor& after, const Tensor& rows) {
  const Tensor is_new = rows.lt(0);
  // Where the parameter is not what it was; what is not a number is not even itself.
  const Tensor differs = after.ne(rows_of(before, rows)).logical_or_(beside(is_new, after));
  return with_rows_changed(state, [&](const StateField& field, const Tensor& all) {
    Tensor values = rows_of(all, rows);
    const auto of_parameter = [&] { return after.to(values.options()); };
    if (field.kind == StateKind::master) {
      return at::where(differs.to(values.device()), of_parameter(), values);
    }
    if (is_average(traits, field)) return at::where(beside(is_new, values), of_parameter(), values);
    return field.kind == StateKind::remainder ? values.masked_fill_(differs.to(values.device()), 0) : values;
  });
}

std::unique_ptr<torch::optim::OptimizerParamState> state_with_more_rows(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state, const Tensor& more,
    RowRoom& room) {
  return with_rows_changed(state, [&](const StateField& field, const Tensor& values) {
    const bool begins_at_parameter = field.kind == StateKind::master || is_average(traits, field);
    return begins_at_parameter ? room.extended(values, more.to(values.options()))
                               : room.extended(values, more.size(0));
  });
}

}  // namespace pacer::detail
