#include <pacer/optimizers/fused_optimizer.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_engine.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/adam_named_state.h>
#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

// The options as the flavour's own type; throws where they belong to another optimizer.
std::unique_ptr<OptimizerOptions> adopt(const detail::AdamFlavour& flavour, const OptimizerOptions& options,
                                        size_t group) {
  auto own = flavour.adopt(options);
  require(own != nullptr, flavour.name, ": the options of group ", group,
          " belong to another optimizer; use ", flavour.name, "Options");
  flavour.settings(*own);
  return own;
}

// Groups whose options, where they have any, are of the flavour's own type. They will be groups first_group,
// ...
std::vector<OptimizerParamGroup> adopt_groups(const detail::AdamFlavour& flavour,
                                              const std::vector<OptimizerParamGroup>& groups,
                                              const OptimizerOptions& defaults, size_t first_group = 0) {
  flavour.settings(defaults);
  std::vector<OptimizerParamGroup> adopted;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      require(parameters[i].defined(), flavour.name, ": parameter ", first_group + g, ".", i,
              " is undefined");
    }
    adopted.emplace_back(parameters);
    if (groups[g].has_options())
      adopted.back().set_options(adopt(flavour, groups[g].options(), first_group + g));
  }
  return adopted;
}

std::vector<OptimizerParamGroup> without_names(const std::vector<NamedParamGroup>& groups) {
  std::vector<OptimizerParamGroup> plain;
  for (const NamedParamGroup& group : groups) {
    plain.emplace_back(group.parameters.values(), group.options ? group.options->clone() : nullptr);
  }
  return plain;
}

void add_names(const NamedParameters& parameters, detail::ParameterNames& names) {
  for (const auto& item : parameters) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
}

}  // namespace

FusedOptimizer::FusedOptimizer(const detail::AdamFlavour& flavour,
                               const std::vector<OptimizerParamGroup>& groups,
                               std::unique_ptr<OptimizerOptions> defaults)
    : SessionOptimizer(adopt_groups(flavour, groups, *defaults), defaults->clone()),
      flavour_(&flavour),
      engine_(std::make_unique<detail::AdamEngine>(flavour)) {
  detail::check_groups(param_groups_, names_);
}

FusedOptimizer::FusedOptimizer(const detail::AdamFlavour& flavour, const std::vector<NamedParamGroup>& groups,
                               std::unique_ptr<OptimizerOptions> defaults)
    : SessionOptimizer(adopt_groups(flavour, without_names(groups), *defaults), defaults->clone()),
      flavour_(&flavour),
      engine_(std::make_unique<detail::AdamEngine>(flavour)) {
  for (const NamedParamGroup& group : groups) add_names(group.parameters, names_);
  detail::check_groups(param_groups_, names_);
}

FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;
FusedOptimizer::~FusedOptimizer() = default;

void FusedOptimizer::add_param_group(const OptimizerParamGroup& group) {
  auto with_group = adopt_groups(*flavour_, {group}, *defaults_, param_groups_.size());
  std::vector<OptimizerParamGroup> all(param_groups_);
  all.push_back(with_group.front());
  detail::check_groups(all, names_);
  Optimizer::add_param_group(with_group.front());
}

void FusedOptimizer::add_param_group(const NamedParamGroup& group) {
  detail::ParameterNames names = names_;
  add_names(group.parameters, names);
  std::swap(names, names_);
  try {
    add_param_group(
        OptimizerParamGroup(group.parameters.values(), group.options ? group.options->clone() : nullptr));
  } catch (...) {
    std::swap(names, names_);
    throw;
  }
}

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  prepare(plain_step_inputs());
  conclude(enqueue());
  return loss;
}

void FusedOptimizer::adopt_foreign_options() const {
  auto& groups = const_cast<FusedOptimizer*>(this)->param_groups_;  // another type, the same values
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!flavour_->owns(groups[g].options())) groups[g].set_options(adopt(*flavour_, groups[g].options(), g));
  }
}

void FusedOptimizer::prepare(const StepInputs& inputs) {
  adopt_foreign_options();
  prepare_groups(param_groups_, inputs);
}

void FusedOptimizer::prepare_groups(std::vector<OptimizerParamGroup>& groups, const StepInputs& inputs) {
  const torch::NoGradGuard no_grad;
  engine_->prepare(groups, state_, names_, inputs);
}

bool FusedOptimizer::enqueue() {
  const torch::NoGradGuard no_grad;
  return engine_->enqueue();
}

void FusedOptimizer::conclude(bool applied) { engine_->conclude(applied); }

bool FusedOptimizer::look_early(const std::vector<torch::Tensor>& parameters) {
  return engine_->look_early(parameters);
}

int64_t FusedOptimizer::enqueue_version() const { return engine_->enqueue_version(); }

double FusedOptimizer::base_lr(size_t group) {
  adopt_foreign_options();
  return flavour_->base_lr(param_groups_.at(group).options());
}

void FusedOptimizer::name_parameters(const NamedParameters& names) { add_names(names, names_); }

NamedTensors FusedOptimizer::export_state() const {
  adopt_foreign_options();
  return detail::export_adam(*flavour_, param_groups_, state_, names_);
}

void FusedOptimizer::import_state(const NamedTensors& state) {
  restore(detail::import_adam(*flavour_, param_groups_, names_, state));
}

int64_t FusedOptimizer::skipped_steps() const { return engine_->skipped_steps(); }

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
      find_name(parameter).has_value(), flavour_->name,
      ": a trust ratio was asked for of a tensor that is not one of the parameters; pass one of those the "
      "optimizer was given");
  return engine_->trust_ratio(parameter);
}

void FusedOptimizer::restore(detail::PendingState pending) {
  detail::check_pending(pending, *flavour_, param_groups_, names_);
  detail::commit_pending(std::move(pending), param_groups_, state_);
}

}  // namespace pacer
