#include <pacer/optimizers/fused_optimizer.h>

#include <algorithm>
#include <iterator>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/optimizers/detail/group_defaults.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

// Groups with options of the optimizer's own type. They will be groups first_group, ...
std::vector<OptimizerParamGroup> adopt_groups(const detail::OptimizerTraits& traits,
                                              const std::vector<OptimizerParamGroup>& groups,
                                              const OptimizerOptions& defaults, size_t first_group = 0) {
  traits.settings(defaults);
  std::vector<OptimizerParamGroup> adopted;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      require(parameter.defined(), traits.name, ": parameter ", i, " of group ", first_group + g,
              " is undefined");
      require(
          parameter.is_leaf(), traits.name, ": parameter ", i, " of group ", first_group + g, " (shape ",
          parameter.sizes(),
          ") is no leaf of the graph but the result of an operation; pass the model's own parameters, and "
          "call "
          "requires_grad_() after the last operation");
    }
    auto options = defaults.clone();
    if (groups[g].has_options()) {
      options = detail::adopt(traits, groups[g].options(), defaults, first_group + g);
      traits.inherit(*options, defaults);
    }
    adopted.emplace_back(parameters, std::move(options));
  }
  return adopted;
}

// Throws where groups cannot be this optimizer's. Whether parameters of those before `first` are matrices is
// left to the next step: their options may have changed since, also to torch's own.
void check_new_groups(const detail::OptimizerTraits& traits, const std::vector<OptimizerParamGroup>& groups,
                      const detail::TensorNames& names, size_t first = 0) {
  detail::check_groups(groups, names);
  detail::check_names(groups, names);
  if (!traits.has_matrices) return;
  std::vector<detail::GroupSettings> settings(first);
  for (size_t g = first; g < groups.size(); ++g) settings.push_back(traits.settings(groups[g].options()));
  detail::check_matrices(traits.name, groups, settings, names);
}

std::vector<OptimizerParamGroup> without_names(const std::vector<NamedParamGroup>& groups) {
  std::vector<OptimizerParamGroup> plain;
  for (const NamedParamGroup& group : groups) {
    plain.emplace_back(group.parameters.values(), group.options ? group.options->clone() : nullptr);
  }
  return plain;
}

void add_names(const NamedParameters& parameters, detail::TensorNames& names) {
  for (auto item = names.begin(); item != names.end();) {
    item = item->second.first.expired() ? names.erase(item) : std::next(item);
  }
  for (const auto& item : parameters) {
    if (!item.value().defined()) continue;  // refused where the groups are looked at
    names.emplace(item.value().unsafeGetTensorImpl(),
                  std::make_pair(detail::HeldAddress(item.value().getIntrusivePtr()), item.key()));
  }
}

detail::TensorNames names_in(const std::vector<NamedParamGroup>& groups) {
  detail::TensorNames names;
  for (const NamedParamGroup& group : groups) add_names(group.parameters, names);
  return names;
}

}  // namespace

FusedOptimizer::FusedOptimizer(const std::vector<OptimizerParamGroup>& groups, detail::TensorNames names,
                               std::unique_ptr<OptimizerOptions> defaults)
    : SessionOptimizer(std::vector<OptimizerParamGroup>(), defaults->clone()),
      traits_(&detail::traits_of(*defaults)),
      known_groups_(groups.size()),
      names_(std::move(names)),
      engine_(std::make_unique<detail::StepEngine>(*traits_)) {
  param_groups_ = adopt_groups(*traits_, groups, *defaults_);  // torch's constructor may drop their options
  check_new_groups(*traits_, param_groups_, names_);
  if (const auto& paging = traits_->settings(*defaults_).paging) engine().page(*paging);
}
FusedOptimizer::FusedOptimizer(const std::vector<OptimizerParamGroup>& groups,
                               std::unique_ptr<OptimizerOptions> defaults)
    : FusedOptimizer(groups, {}, std::move(defaults)) {}
FusedOptimizer::FusedOptimizer(const std::vector<NamedParamGroup>& groups,
                               std::unique_ptr<OptimizerOptions> defaults)
    : FusedOptimizer(without_names(groups), names_in(groups), std::move(defaults)) {}

FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;
FusedOptimizer::~FusedOptimizer() = default;

detail::StepEngine& FusedOptimizer::engine() const {
  require(engine_ != nullptr, traits_->name,
          ": this optimizer was moved from, and what it had is another one's; use that one");
  return *engine_;
}

void FusedOptimizer::add_param_group(const OptimizerParamGroup& group) {
  (void)engine();  // is there
  auto with_group = adopt_groups(*traits_, {group}, *defaults_, param_groups_.size());
  std::vector<OptimizerParamGroup> all(param_groups_);
  all.push_back(with_group.front());
  check_new_groups(*traits_, all, names_, /*first=*/param_groups_.size());
  param_groups_.push_back(std::move(with_group.front()));
  ++known_groups_;
}

void FusedOptimizer::add_param_group(const NamedParamGroup& group) {
  const detail::TensorNames before = names_;
  add_names(group.parameters, names_);
  try {
    add_param_group(without_names({group}).front());
  } catch (...) {
    names_ = before;
    throw;
  }
}

detail::OptimizerView FusedOptimizer::view() const {
  return {*traits_, param_groups_, state_, *defaults_, names_, engine().ranges(), engine().is_paged()};
}

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  require_whole("step");
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  prepare(is_clipping() ? clipped_step_inputs() : plain_step_inputs());
  conclude(enqueue());
  return loss;
}

void FusedOptimizer::adopt_foreign_options() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const OptimizerOptions& options = param_groups_[g].options();
    if (!traits_->owns(options))
      param_groups_[g].set_options(detail::adopt(*traits_, options, *defaults_, g));
  }
  const bool has_grown = param_groups_.size() > known_groups_;
  known_groups_ = param_groups_.size();
  if (has_grown && detail::kGroupsInheritDefaults) {
    TORCH_WARN(detail::concatenate(
        traits_->name, ": group ", known_groups_ - 1,
        " was added through torch::optim::Optimizer, which drops a group's options where they are not of "
        "its own types; the group has the optimizer's defaults, so add groups with options through ",
        traits_->name, " itself"));
  }
}

void FusedOptimizer::prepare(const StepInputs& inputs) {
  require(!is_clipping() || (clipping_ && inputs.guard == clipping_), traits_->name,
          ": clip_gradient_norm is for step() without a Session, which clips by the norm that all of its "
          "ranks have; leave it out and use GradientClipping");
  const torch::NoGradGuard no_grad;
  adopt_foreign_options();
  engine().prepare(param_groups_, detail::settings_of(*traits_, param_groups_), state_, names_, inputs);
}

bool FusedOptimizer::enqueue() {
  const torch::NoGradGuard no_grad;
  return engine().enqueue();
}

void FusedOptimizer::conclude(bool applied) { engine().conclude(applied); }

bool FusedOptimizer::look_early(const std::vector<torch::Tensor>& parameters) {
  return engine().look_early(parameters);
}

void FusedOptimizer::expect_step() { engine().expect_step(); }

std::string FusedOptimizer::unshared_reason(GradientScope /*among*/) const {
  if (!engine().is_paged()) return "";
  for (const detail::GroupSettings& settings : detail::settings_of(*traits_, param_groups_)) {
    if (settings.kernel.rule == kernels::UpdateRule::lamb) {
      return "its state is paged, and the norms of a tensor would be added up over ranks page by page; leave "
             "out "
             "paged(), or use FusedAdamW";
    }
  }
  return "";
}

bool FusedOptimizer::is_part(const std::string& name, const torch::Tensor& tensor) const {
  const std::string field = name.substr(name.rfind('/') + 1);
  return tensor.dim() == 1 && field != detail::kTrustAverage && field != detail::kRowMoment;
}

int64_t FusedOptimizer::elements_each(const std::string& name) const {
  const std::string field = name.substr(name.rfind('/') + 1);
  const bool are_scales = std::any_of(
      std::begin(detail::kStateFields), std::end(detail::kStateFields),
      [&](const detail::StateField& known) { return detail::is_scale(known.kind) && field == known.name; });
  return are_scales ? kernels::kMomentGroup : 1;
}

// Codes of 8 bits share scales in groups. LAMB adds up parameters and updates in units, which only one rank can do
// that has all of a unit; 1-bit optimizers add up gradients and variances so.
int64_t FusedOptimizer::smallest_piece() const {
  if (traits_->is_onebit) return kReductionUnit;
  int64_t piece = 1;
  for (const detail::GroupSettings& settings : detail::settings_of(*traits_, param_groups_)) {
    if (settings.kernel.rule == kernels::UpdateRule::lamb) return kReductionUnit;
    if (settings.state_bits == 8) piece = kernels::kMomentGroup;
  }
  return piece;
}

void FusedOptimizer::update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) {
  const std::string reason = unshared_reason(GradientScope::node);
  require(reason.empty(), "ranks cannot share the work of ", traits_->name, ", because ", reason);
  const ParameterRanges& before = engine().ranges();
  const int64_t piece = smallest_piece();
  std::vector<detail::RegisteredParameter> shared = view().parameters();
  const auto is_whole = [&](const auto& parameter) { return ranges.count(parameter.key()) == 0; };
  shared.erase(std::remove_if(shared.begin(), shared.end(), is_whole), shared.end());
  for (const detail::RegisteredParameter& parameter : shared) {
    const ParameterRange& range = ranges.at(parameter.key());
    require(range.bounds.size() == static_cast<size_t>(ranks->world_size()) + 1, traits_->name,
            ": a part has the bounds of ", range.bounds.size() - 1, " ranks, of which there are ",
            ranks->world_size());
    for (size_t r = 1; r + 1 < range.bounds.size(); ++r) {
      require(range.bounds[r] % piece == 0 || range.bounds[r] == range.bounds.back(), traits_->name,
              ": a parameter is cut at element ", range.bounds[r], ", but must be at a multiple of ", piece);
    }
    const auto found = before.find(parameter.key());
    const bool is_same =
        found != before.end() && found->second.first == range.first && found->second.count == range.count;
    require(
        before.empty() || (before.size() == shared.size() && is_same), traits_->name,
        " is shared out already, in other parts; save a checkpoint and resume from it with a new optimizer");
  }
  const torch::NoGradGuard no_grad;
  const bool is_cut = is_shared_out();
  for (const detail::RegisteredParameter& parameter : shared) {
    const ParameterRange& range = ranges.at(parameter.key());
    engine().update_only(parameter.tensor, range);
    const auto state = state_.find(parameter.key());
    if (state == state_.end() || is_cut) continue;
    if (auto adopted = detail::adopted_state(*traits_, *state->second)) state->second = std::move(adopted);
    detail::cut_state(dynamic_cast<FusedAdamStateFields&>(*state->second), parameter.tensor, range,
                      parameter.name);
  }
  engine().share_norm_with(std::move(ranks));
}

bool FusedOptimizer::is_shared_out() const { return !engine().ranges().empty(); }

void FusedOptimizer::require_whole(const char* what) const {
  require(
      !is_shared_out(), traits_->name, ": ", what,
      " is about whole parameters, of which this rank updates a part only; leave steps to the Session, and "
      "saving to its Checkpoints hook");
}

int64_t FusedOptimizer::enqueue_version() const { return engine().enqueue_version(); }

double FusedOptimizer::base_lr(size_t group) {
  adopt_foreign_options();
  return traits_->base_lr(param_groups_.at(group).options());
}

void FusedOptimizer::set_base_lr(size_t group, double rate) {
  adopt_foreign_options();
  traits_->set_base_lr(param_groups_.at(group).options(), rate);
}

void FusedOptimizer::name_parameters(const NamedParameters& names) {
  detail::TensorNames with_names = names_;
  add_names(names, with_names);
  detail::check_names(param_groups_, with_names);
  names_ = std::move(with_names);
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  require_whole("save");
  sync_state();
  detail::write_optimizer(archive, view());
}
void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  restore(detail::read_optimizer(archive, view()));
}

void FusedOptimizer::sync_state() const { engine().sync_state(); }

int64_t FusedOptimizer::resident_state_bytes() const { return engine().resident_state_bytes(); }

NamedTensors FusedOptimizer::export_state() const {
  sync_state();
  return detail::export_state(view());
}

bool FusedOptimizer::keeps_state_on_host() const { return engine().is_paged(); }

SessionOptimizer::PreparedImport FusedOptimizer::prepare_import(const NamedTensors& state,
                                                                const NamedTensors& rank_state) {
  require_no_rank_state(rank_state);
  const auto pending = std::make_shared<detail::PendingState>(detail::import_state(state, view()));
  detail::check_pending(*pending, view());
  return [this, pending] { commit(*pending); };
}

int64_t FusedOptimizer::skipped_steps() const { return engine().skipped_steps(); }

std::optional<std::string> FusedOptimizer::find_name(const torch::Tensor& parameter) const {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_same(parameter)) return detail::name_of(names_, parameter, g, i);
    }
  }
  return std::nullopt;
}

std::string FusedOptimizer::parameter_name(const torch::Tensor& parameter) const {
  return find_name(parameter).value_or("unknown");
}

double FusedOptimizer::trust_ratio_of(const torch::Tensor& parameter) const {
  require(
      find_name(parameter).has_value(), traits_->name,
      ": a trust ratio was asked for of a tensor that is not one of the parameters; pass one of those the "
      "optimizer was given");
  return engine().trust_ratio(parameter);
}

void FusedOptimizer::restore(detail::PendingState pending) {
  require_whole("load or take_over");
  detail::check_pending(pending, view());
  commit(pending);
}

void FusedOptimizer::commit(detail::PendingState& pending) {
  engine().forget_plan();
  detail::commit_pending(pending, param_groups_, state_);
}

}  // namespace pacer
