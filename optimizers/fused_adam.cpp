#include <pacer/optimizers/fused_adam.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

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

FusedAdamBase::FusedAdamBase(const detail::AdamFlavour& flavour,
                             const std::vector<OptimizerParamGroup>& groups,
                             std::unique_ptr<OptimizerOptions> defaults)
    : SessionOptimizer(adopt_groups(flavour, groups, *defaults), defaults->clone()),
      flavour_(&flavour),
      engine_(std::make_unique<detail::AdamEngine>(flavour)) {
  detail::check_groups(param_groups_, names_);
}

FusedAdamBase::FusedAdamBase(const detail::AdamFlavour& flavour, const std::vector<NamedParamGroup>& groups,
                             std::unique_ptr<OptimizerOptions> defaults)
    : SessionOptimizer(adopt_groups(flavour, without_names(groups), *defaults), defaults->clone()),
      flavour_(&flavour),
      engine_(std::make_unique<detail::AdamEngine>(flavour)) {
  for (const NamedParamGroup& group : groups) add_names(group.parameters, names_);
  detail::check_groups(param_groups_, names_);
}

FusedAdamBase::FusedAdamBase(FusedAdamBase&&) noexcept = default;
FusedAdamBase& FusedAdamBase::operator=(FusedAdamBase&&) noexcept = default;
FusedAdamBase::~FusedAdamBase() = default;

void FusedAdamBase::add_param_group(const OptimizerParamGroup& group) {
  auto with_group = adopt_groups(*flavour_, {group}, *defaults_, param_groups_.size());
  std::vector<OptimizerParamGroup> all(param_groups_);
  all.push_back(with_group.front());
  detail::check_groups(all, names_);
  Optimizer::add_param_group(with_group.front());
}

void FusedAdamBase::add_param_group(const NamedParamGroup& group) {
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

torch::Tensor FusedAdamBase::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  prepare({});
  conclude(enqueue());
  return loss;
}

void FusedAdamBase::adopt_foreign_options() const {
  auto& groups = const_cast<FusedAdamBase*>(this)->param_groups_;  // another type, the same values
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!flavour_->owns(groups[g].options())) groups[g].set_options(adopt(*flavour_, groups[g].options(), g));
  }
}

void FusedAdamBase::prepare(const StepInputs& inputs) {
  const torch::NoGradGuard no_grad;
  adopt_foreign_options();
  engine_->prepare(param_groups_, state_, names_, inputs);
}

bool FusedAdamBase::enqueue() {
  const torch::NoGradGuard no_grad;
  return engine_->enqueue();
}

void FusedAdamBase::conclude(bool applied) { engine_->conclude(applied); }

int64_t FusedAdamBase::enqueue_version() const { return engine_->enqueue_version(); }

double FusedAdamBase::base_lr(size_t group) {
  adopt_foreign_options();
  return flavour_->base_lr(param_groups_.at(group).options());
}

void FusedAdamBase::name_parameters(const NamedParameters& names) { add_names(names, names_); }

NamedTensors FusedAdamBase::export_state() const {
  adopt_foreign_options();
  return detail::export_adam(*flavour_, param_groups_, state_, names_);
}

void FusedAdamBase::import_state(const NamedTensors& state) {
  restore(detail::import_adam(*flavour_, param_groups_, names_, state));
}

int64_t FusedAdamBase::skipped_steps() const { return engine_->skipped_steps(); }

std::string FusedAdamBase::parameter_name(const torch::Tensor& parameter) const {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_same(parameter)) return detail::name_of(names_, parameter, g, i);
    }
  }
  return "unknown";
}

void FusedAdamBase::restore(detail::PendingState pending) {
  detail::check_pending(pending, *flavour_, param_groups_, names_);
  detail::commit_pending(std::move(pending), param_groups_, state_);
}

FusedAdam::FusedAdam(const std::vector<OptimizerParamGroup>& groups, FusedAdamOptions defaults)
    : FusedAdamBase(detail::kAdamFlavour, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}
FusedAdam::FusedAdam(std::vector<torch::Tensor> parameters, FusedAdamOptions defaults)
    : FusedAdam({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdam::FusedAdam(const NamedParameters& parameters, FusedAdamOptions defaults)
    : FusedAdam(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdam::FusedAdam(const std::vector<NamedParamGroup>& groups, FusedAdamOptions defaults)
    : FusedAdamBase(detail::kAdamFlavour, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}

void FusedAdam::save(torch::serialize::OutputArchive& archive) const {
  adopt_foreign_options();
  torch::optim::serialize<FusedAdamParamState, FusedAdamOptions>(archive, *this);
}
void FusedAdam::load(torch::serialize::InputArchive& archive) {
  restore(detail::read_optimizer<FusedAdamParamState, FusedAdamOptions>(archive, "FusedAdam", param_groups_));
}
void FusedAdam::take_over(const torch::optim::Adam& source) {
  restore(detail::copy_of_torch_optimizer<FusedAdamParamState, torch::optim::AdamParamState>(
      source, detail::kAdamFlavour, param_groups_, names()));
}

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedAdamBase(detail::kAdamWFlavour, groups, std::make_unique<FusedAdamWOptions>(std::move(defaults))) {
}
FusedAdamW::FusedAdamW(std::vector<torch::Tensor> parameters, FusedAdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdamW::FusedAdamW(const NamedParameters& parameters, FusedAdamWOptions defaults)
    : FusedAdamW(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdamW::FusedAdamW(const std::vector<NamedParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedAdamBase(detail::kAdamWFlavour, groups, std::make_unique<FusedAdamWOptions>(std::move(defaults))) {
}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  adopt_foreign_options();
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, *this);
}
void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  restore(
      detail::read_optimizer<FusedAdamWParamState, FusedAdamWOptions>(archive, "FusedAdamW", param_groups_));
}
void FusedAdamW::take_over(const torch::optim::AdamW& source) {
  restore(detail::copy_of_torch_optimizer<FusedAdamWParamState, torch::optim::AdamWParamState>(
      source, detail::kAdamWFlavour, param_groups_, names()));
}

}  // namespace pacer
