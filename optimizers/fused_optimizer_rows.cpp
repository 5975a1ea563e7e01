// Parameters that grow and shrink by rows: replace and append_rows. And those of which steps change some rows:
// set_visible_rows.
#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/state_rows.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/fused_optimizer.h>

namespace pacer {
namespace {

using at::Tensor;
using detail::RegisteredParameter;

void check_replacement(const RegisteredParameter& before, const Tensor& after, const Tensor& rows) {
  const Tensor& parameter = before.tensor;
  require(parameter.dim() > 0, "replace: parameter ", before.in_message(),
          " has no rows, because it is a single number");
  require(after.defined() && after.is_leaf(), "replace: what takes the place of ", before.in_message(),
          " must be a tensor that no operation has made; detach() it, then call requires_grad_()");
  require(after.requires_grad() == parameter.requires_grad(), "replace: ", before.in_message(),
          parameter.requires_grad() ? " needs a gradient, and" : " needs no gradient, and",
          " what takes its place must be like it; see requires_grad_()");
  require(after.scalar_type() == parameter.scalar_type() && after.device() == parameter.device(),
          "replace: ", before.in_message(), " is ", parameter.scalar_type(), " on ", parameter.device(),
          ", and what takes its place is ", after.scalar_type(), " on ", after.device());
  require(after.dim() == parameter.dim() && after.sizes().slice(1) == parameter.sizes().slice(1) &&
              after.size(0) == rows.numel(),
          "replace: with ", rows.numel(), " rows, ", before.in_message(), " of shape ", parameter.sizes(),
          " cannot become one of shape ", after.sizes());
}

// The least and the largest of the rows that are asked for; -1 both where there are none. Waits for a GPU.
std::pair<int64_t, int64_t> range_of(const Tensor& rows) {
  require(rows.defined() && rows.scalar_type() == at::kLong && rows.dim() == 1,
          "replace: rows are one vector of integers (Long): for each new row the old one, or -1");
  if (rows.numel() == 0) return {-1, -1};
  const auto [least, most] = at::aminmax(rows);
  return {least.item<int64_t>(), most.item<int64_t>()};
}

void check_more_rows(const RegisteredParameter& parameter, const Tensor& more) {
  const Tensor& known = parameter.tensor;
  require(known.dim() > 0, "append_rows: parameter ", parameter.in_message(),
          " has no rows, because it is a single number");
  require(known.is_contiguous(), "append_rows: the rows of ", parameter.in_message(),
          " do not lie one behind the other; give what takes its place to replace");
  require(more.defined() && more.scalar_type() == known.scalar_type() && more.device() == known.device() &&
              more.dim() == known.dim() && more.sizes().slice(1) == known.sizes().slice(1),
          "append_rows: ", parameter.in_message(), " of shape ", known.sizes(), ", ", known.scalar_type(),
          " on ", known.device(), ", takes rows like its own");
}

// Throws InvalidArgument where the optimizer has no such parameter.
const RegisteredParameter& find_parameter(const char* optimizer, const char* function,
                                          const std::vector<RegisteredParameter>& parameters,
                                          const Tensor& sought) {
  const auto found =
      std::find_if(parameters.begin(), parameters.end(),
                   [&](const RegisteredParameter& parameter) { return parameter.tensor.is_same(sought); });
  require(found != parameters.end(), optimizer, ": ", function,
          " was given a tensor that is not one of its parameters");
  return *found;
}

}  // namespace

std::vector<RegisteredParameter> FusedOptimizer::parameters_to_change(
    const char* function, const std::vector<std::pair<Tensor, Tensor>>& pairs) {
  require_whole(function);
  require(!has_own_ranks(), traits_->name, ": ", function,
          " is not for 1-bit optimizers, whose ranks send what they have once agreed on; use FusedAdamW");
  adopt_foreign_options();
  const std::vector<RegisteredParameter> own = view().parameters();
  std::vector<RegisteredParameter> found;
  for (const auto& pair : pairs) {
    found.push_back(find_parameter(traits_->name, function, own, pair.first));
    require(std::none_of(found.begin(), found.end() - 1,
                         [&](const auto& other) { return other.key() == found.back().key(); }),
            function, ": ", found.back().in_message(), " is named twice; name each parameter once");
  }
  return found;
}

void FusedOptimizer::put_in_place(const std::vector<RegisteredParameter>& before,
                                  const std::vector<Tensor>& after, const StateOfRows& state_of_rows) {
  std::vector<torch::optim::OptimizerParamGroup> groups(param_groups_);
  detail::TensorNames names = names_;
  for (size_t i = 0; i < before.size(); ++i) {
    groups[before[i].group].params()[before[i].index] = after[i];
    if (const std::string* name = detail::given_name(names_, before[i].tensor)) {
      names.insert_or_assign(after[i].unsafeGetTensorImpl(),
                             std::make_pair(detail::HeldAddress(after[i].getIntrusivePtr()), *name));
    }
  }
  detail::check_groups(groups, names);
  detail::check_names(groups, names);
  detail::check_matrices(traits_->name, groups, detail::settings_of(*traits_, groups), names);
  sync_state();
  decltype(state_) states;  // of what is new
  for (size_t i = 0; i < before.size(); ++i) {
    const auto state = state_.find(before[i].key());
    if (state == state_.end()) continue;
    const auto adopted = detail::adopted_state(*traits_, *state->second);
    states[after[i].unsafeGetTensorImpl()] = state_of_rows(i, adopted ? *adopted : *state->second);
  }
  state_.reserve(state_.size() + states.size());
  // From here on nothing throws.
  engine().forget_plan();
  for (const RegisteredParameter& parameter : before) state_.erase(parameter.key());
  for (auto& [key, state] : states) state_[key] = std::move(state);
  for (const RegisteredParameter& parameter : before) engine().set_visible_rows(parameter.tensor, {});
  for (size_t i = 0; i < before.size(); ++i) {
    param_groups_[before[i].group].params()[before[i].index] = after[i];
  }
  names_ = std::move(names);
}

void FusedOptimizer::replace(const std::vector<std::pair<Tensor, Tensor>>& parameters, const Tensor& rows) {
  const torch::NoGradGuard no_grad;
  const std::vector<RegisteredParameter> before = parameters_to_change("replace", parameters);
  const auto [least, most] = range_of(rows);
  std::vector<Tensor> after;
  for (size_t i = 0; i < before.size(); ++i) {
    after.push_back(parameters[i].second);
    check_replacement(before[i], after.back(), rows);
    require(least >= -1 && most < before[i].tensor.size(0), "replace: rows from ", least, " to ", most,
            " are asked of ", before[i].in_message(), ", which has ", before[i].tensor.size(0),
            "; -1 stands for a new row");
  }
  put_in_place(before, after, [&, &rows = rows](size_t i, const torch::optim::OptimizerParamState& state) {
    return detail::state_of_rows(*traits_, state, before[i].tensor, after[i], rows);
  });
}

std::vector<Tensor> FusedOptimizer::append_rows(const std::vector<std::pair<Tensor, Tensor>>& parameters) {
  const torch::NoGradGuard no_grad;
  const std::vector<RegisteredParameter> before = parameters_to_change("append_rows", parameters);
  for (size_t i = 0; i < before.size(); ++i) check_more_rows(before[i], parameters[i].second);
  detail::RowRoom& room = engine().row_room();
  std::vector<Tensor> after;
  for (const auto& [known, more] : parameters) {
    after.push_back(room.extended(known, more.detach()).requires_grad_(known.requires_grad()));
  }
  put_in_place(before, after, [&](size_t i, const torch::optim::OptimizerParamState& state) {
    return detail::state_with_more_rows(*traits_, state, parameters[i].second.detach(), room);
  });
  return after;
}

void FusedOptimizer::set_visible_rows(const std::vector<Tensor>& parameters, const Tensor& visible) {
  require_whole("set_visible_rows");
  require(!engine().is_paged(), traits_->name,
          ": set_visible_rows is not for paged state, which comes whole; leave out paged()");
  require(!visible.defined() ||
              (visible.scalar_type() == at::kBool && visible.dim() == 1 && visible.is_contiguous()),
          "set_visible_rows: which rows are visible is one contiguous vector of Bool, one for each row");
  const torch::NoGradGuard no_grad;
  adopt_foreign_options();
  const std::vector<RegisteredParameter> own = view().parameters();
  const std::vector<detail::GroupSettings> settings = detail::settings_of(*traits_, param_groups_);
  for (const Tensor& parameter : parameters) {
    const RegisteredParameter& found = find_parameter(traits_->name, "set_visible_rows", own, parameter);
    if (!visible.defined()) continue;
    detail::check_has_rows(*traits_, settings[found.group], parameter, found.name);
    require(visible.numel() == parameter.size(0) && visible.device() == parameter.device(),
            "set_visible_rows: ", found.in_message(), " has ", parameter.size(0), " rows on ",
            parameter.device(), ", but which are visible is said by ", visible.numel(), " numbers on ",
            visible.device());
  }
  require(!visible.defined() || !has_own_ranks(), traits_->name,
          ": set_visible_rows is not for 1-bit optimizers, whose ranks send whole tensors; use FusedAdamW");
  for (const Tensor& parameter : parameters) engine().set_visible_rows(parameter, visible);
}

}  // namespace pacer
