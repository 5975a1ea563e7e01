// Parameters that grow and shrink by rows: replace.
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

}  // namespace

void FusedOptimizer::replace(const std::vector<std::pair<Tensor, Tensor>>& parameters, const Tensor& rows) {
  require_whole("replace");
  require(!traits_->is_onebit, traits_->name,
          ": replace is not for 1-bit optimizers, whose ranks send what they have once agreed on; use "
          "FusedAdamW");
  const auto [least, most] = range_of(rows);
  const torch::NoGradGuard no_grad;
  adopt_foreign_options();
  const std::vector<RegisteredParameter> own = view().parameters();
  std::vector<RegisteredParameter> before;
  std::vector<torch::optim::OptimizerParamGroup> groups(param_groups_);
  detail::TensorNames names = names_;
  for (const auto& [old, now] : parameters) {
    const auto found =
        std::find_if(own.begin(), own.end(), [&, sought = &old](const RegisteredParameter& parameter) {
          return parameter.tensor.is_same(*sought);
        });
    require(found != own.end(), traits_->name,
            ": replace was asked for a tensor that is not one of its parameters");
    require(std::none_of(before.begin(), before.end(),
                         [&](const auto& other) { return other.key() == found->key(); }),
            "replace: ", found->in_message(), " is named twice; name each parameter once");
    check_replacement(*found, now, rows);
    require(least >= -1 && most < old.size(0), "replace: rows from ", least, " to ", most, " are asked of ",
            found->in_message(), ", which has ", old.size(0), "; -1 stands for a new row");
    groups[found->group].params()[found->index] = now;
    if (const std::string* name = detail::given_name(names_, old)) {
      names.insert_or_assign(now.unsafeGetTensorImpl(),
                             std::make_pair(detail::HeldAddress(now.getIntrusivePtr()), *name));
    }
    before.push_back(*found);
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
    const Tensor& now = parameters[i].second;
    states[now.unsafeGetTensorImpl()] =
        detail::state_of_rows(*traits_, adopted ? *adopted : *state->second, before[i].tensor, now, rows);
  }
  state_.reserve(state_.size() + states.size());
  // From here on nothing throws.
  engine().forget_plan();
  for (const RegisteredParameter& parameter : before) state_.erase(parameter.key());
  for (auto& [key, state] : states) state_[key] = std::move(state);
  for (size_t i = 0; i < before.size(); ++i) {
    param_groups_[before[i].group].params()[before[i].index] = parameters[i].second;
  }
  names_ = std::move(names);
}

}  // namespace pacer
