// A 1-bit optimizer beside its steps: how it is made, and what others want to know. The header says which file has
// the rest.
#include <pacer/optimizers/onebit_optimizer.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/freeze_rule.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/step_across_ranks.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

OneBitOptimizer::OneBitOptimizer(const std::vector<OptimizerParamGroup>& groups,
                                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                 std::shared_ptr<Communicator> world)
    : FusedOptimizer(groups, std::move(defaults)) {
  set_up(std::move(world));
}
OneBitOptimizer::OneBitOptimizer(const std::vector<NamedParamGroup>& groups,
                                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                 std::shared_ptr<Communicator> world)
    : FusedOptimizer(groups, std::move(defaults)) {
  set_up(std::move(world));
}
OneBitOptimizer::~OneBitOptimizer() = default;

const char* OneBitOptimizer::name() const { return traits().name; }

std::vector<detail::GroupSettings> OneBitOptimizer::settings() const {
  return detail::settings_of(traits(), param_groups_);
}

detail::CompressedParameters* OneBitOptimizer::compressed() const { return engine().compressed_parameters(); }

detail::OneBitSetup OneBitOptimizer::setup_for(const std::vector<detail::GroupSettings>& settings) const {
  const detail::OneBitSettings onebit = detail::onebit_settings(name(), settings);
  const bool hierarchical = onebit.hierarchical();
  if (onebit_ && onebit_->hierarchical() == hierarchical) return {onebit, onebit_->rule, onebit_->route};
  detail::OneBitSetup setup{
      onebit, traits().settings(defaults()).kernel.rule, {world_, hierarchical, shard_ranks_ != nullptr}};
  require(
      shard_ranks_ == nullptr || hierarchical, name(),
      ": the ranks of a node share the optimizer, and hierarchical is false in its options or in the state "
      "to load; use hierarchical(true), or DataParallel in place of Shards");
  return setup;
}

void OneBitOptimizer::read_settings() {
  const auto settings = this->settings();
  detail::check_compressible(name(), param_groups_, settings, names());
  onebit_ = std::make_unique<detail::OneBitSetup>(setup_for(settings));
}

void OneBitOptimizer::set_up(std::shared_ptr<Communicator> world) {
  world_ = world ? std::move(world) : detail::alone(name(), device());
  check_device();
  read_settings();
  if (onebit_->freeze_automatically()) {
    warm_up_.rule = std::make_unique<detail::FreezeRule>(*onebit_->freeze_automatically(), onebit_->beta2);
  }
  alone_.guard = std::make_shared<GradientGuard>(world_->device());
  alone_.across_ranks = std::make_unique<detail::StepAcrossRanks>(world_);
  announce_phase();
}

at::Device OneBitOptimizer::device() const {
  for (const auto& group : param_groups_) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return world_ ? world_->device() : at::Device(at::kCPU);
}

void OneBitOptimizer::check_device() const { detail::require_joined_on(device(), name(), *world_); }

template <class Group>
void OneBitOptimizer::add_group(const Group& group) {
  require(!frozen_at_, name(), ": a parameter group cannot be added after the variance froze (step ",
          frozen_at_.value_or(0), "), because it has seen nothing of the new parameters; add it before");
  std::vector<OptimizerParamGroup> before = param_groups_;
  FusedOptimizer::add_param_group(group);
  try {
    read_settings();
  } catch (...) {
    param_groups_ = std::move(before);
    throw;
  }
}
void OneBitOptimizer::add_param_group(const OptimizerParamGroup& group) { add_group(group); }
void OneBitOptimizer::add_param_group(const NamedParamGroup& group) { add_group(group); }

// ---- Who shares the work. ----

std::string OneBitOptimizer::unshared_reason(GradientScope among) const {
  if (among == GradientScope::world || !onebit_->hierarchical()) {
    return "each rank has errors of its own for all parameters, unless nodes are the workers "
           "(hierarchical(true)), whose ranks share them with over(ShardGroup::node)";
  }
  return "";
}

void OneBitOptimizer::update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) {
  require(shard_ranks_ != nullptr || compressed() == nullptr, name(), ": the variance froze (step ",
          frozen_at_.value_or(0),
          ") before ranks share the work; save a checkpoint and resume from it with a new optimizer");
  require(ranks->world_size() == world_->ranks_per_node(), name(), ": parts of ", ranks->world_size(),
          " ranks, but the ranks of a node share them, which are ", world_->ranks_per_node(),
          "; use Shards with over(ShardGroup::node)");
  const auto settings = this->settings();
  for (const detail::RegisteredParameter& parameter : view().parameters()) {
    if (!settings[parameter.group].compresses(parameter.tensor)) continue;
    require(ranges.count(parameter.key()) != 0, "parameter ", parameter.in_message(),
            " is frozen, and so not shared out, but belongs to what is compressed; leave it out of the "
            "optimizer, or give its group compress(false)");
  }
  FusedOptimizer::update_only(ranges, ranks);
  shard_ranks_ = std::move(ranks);
  onebit_->route = {world_, onebit_->hierarchical(), /*ranks_have_parts=*/true};
}

bool OneBitOptimizer::is_part(const std::string& name, const torch::Tensor& tensor) const {
  return FusedOptimizer::is_part(name, tensor) && !detail::is_lamb_number(name);
}

OneBitPhase OneBitOptimizer::phase() const {
  return frozen_at_ ? OneBitPhase::compressed : OneBitPhase::warm_up;
}

std::vector<torch::Tensor> OneBitOptimizer::local_parameters() const {
  return local_parameters(*onebit_, settings());
}

std::vector<torch::Tensor> OneBitOptimizer::local_parameters(
    const detail::OneBitSetup& onebit, const std::vector<detail::GroupSettings>& settings) const {
  std::vector<torch::Tensor> local;
  if (!onebit.exchanges()) return local;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    for (const torch::Tensor& parameter : param_groups_[g].params()) {
      if (settings[g].compresses(parameter)) local.push_back(parameter);
    }
  }
  return local;
}

void OneBitOptimizer::check_run(const Communicator& world, const RunPlan& run) const {
  detail::require_same_ranks(name(), *world_, world);
  require(
      !onebit_->overlap_backward() || !run.looks_first, name(),
      ": overlap_backward(true) sends momentum before all gradients are there, but a hook looks at all of "
      "them first (GradientClipping without by_previous_norm(), or Precision in fp16 or fp8); leave out "
      "either");
  if (!onebit_->freeze_step() || onebit_->allow_early_freeze() || frozen_at_) return;
  require(!run.end || *onebit_->freeze_step() < *run.end, name(), ": freeze_step(", *onebit_->freeze_step(),
          ") is not before step ", run.end.value_or(0),
          ", where the learning-rate schedule ends, so nothing would ever be compressed; freeze earlier");
  // The step before the freeze is the last that the variance has seen.
  const std::string moves = run.unsettled(std::max<int64_t>(*onebit_->freeze_step() - 1, 0));
  require(moves.empty(), name(), ": freeze_step(", *onebit_->freeze_step(), ") comes while ", moves,
          " still moves, and what freezes would be that of other data or options; freeze later, use "
          "freeze_automatically, or say allow_early_freeze(true)");
}

// ---- What others want to know. ----

void OneBitOptimizer::name_parameters(const NamedParameters& of_model) {
  FusedOptimizer::name_parameters(of_model);
  if (!compressed()) return;
  std::vector<std::string> of_tensors;
  for (const auto& tensor : detail::onebit_tensors(view(), settings())) of_tensors.push_back(tensor.name);
  compressed()->rename(of_tensors);
}

int64_t OneBitOptimizer::skipped_steps() const {
  return inputs_.guard ? inputs_.guard->read().skipped_steps : 0;
}

int64_t OneBitOptimizer::bytes_sent() const { return compressed() ? compressed()->bytes_sent() : 0; }

double OneBitOptimizer::compression_error() const {
  return compressed() ? compressed()->compression_error() : 0;
}

}  // namespace pacer
