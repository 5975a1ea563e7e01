// The state of the 1-bit optimizers: what a freeze starts from, and what checkpoints hold.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_engine.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/onebit_plan.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/freeze_rule.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {
namespace {

constexpr const char* kAttempts = "onebit/attempts";
constexpr const char* kFrozenAt = "onebit/frozen_at";  // -1: not yet
constexpr const char* kFreezeIsDue = "onebit/freeze_is_due";
constexpr const char* kNorms = "onebit/variance_norms";

constexpr const char* kRank = "onebit/rank";
constexpr const char* kWorldSize = "onebit/world_size";
constexpr const char* kMates = "onebit/ranks_of_a_worker";

// Errors are those of one rank of so many, even where chunks of other worlds have the same size.
void add_rank(const detail::OneBitRoute& route, NamedTensors& state) {
  state[kRank] = number_tensor(static_cast<int64_t>(route.world().rank()));
  state[kWorldSize] = number_tensor(static_cast<int64_t>(route.world().world_size()));
  state[kMates] = number_tensor(route.mates());
  state[detail::kErrorsVersion] = number_tensor(detail::kStateVersion);
}

// The errors alone, which must be those of this rank.
NamedTensors errors_of_rank(const detail::OneBitRoute& route, NamedTensors state) {
  const Communicator& world = route.world();
  require(!state.empty(),
          "the state to load is frozen, but the errors of this rank are not with it; load them with "
          "import_states");
  const auto rank = require_number<int64_t>(state, kRank);
  const auto world_size = require_number<int64_t>(state, kWorldSize);
  require(rank == world.rank() && world_size == world.world_size(),
          "the state to load has the errors of rank ", rank, " of ", world_size, ", but this is rank ",
          world.rank(), " of ", world.world_size(),
          "; resume with as many ranks, or through join_rank_states");
  const auto mates = require_number<int64_t>(state, kMates);
  require(mates == route.mates(), "the state to load has errors that ", mates,
          " ranks of a node share, but here ", route.mates(),
          " do; resume with as many ranks on each node, or through join_rank_states");
  for (const char* key : {kRank, kWorldSize, kMates, detail::kErrorsVersion}) state.erase(key);
  return state;
}

// Of ranks that share their errors, the first.
std::vector<NamedTensors> states_of_workers(const std::vector<NamedTensors>& rank_states) {
  std::vector<NamedTensors> states;
  for (const NamedTensors& state : rank_states) {
    const bool is_of_rank = state.count(kMates) != 0;
    const int64_t mates = is_of_rank ? require_number<int64_t>(state, kMates) : 1;
    require(mates >= 1, "\"", kMates, "\" of the state to load is ", mates, ", which cannot be");
    if (!is_of_rank || require_number<int64_t>(state, kRank) % mates == 0) states.push_back(state);
  }
  return states;
}

}  // namespace

std::unique_ptr<detail::OneBitPart> OneBitOptimizer::make_part(std::vector<detail::OneBitTensor> tensors,
                                                               const detail::OneBitPlan& plan) const {
  std::unique_ptr<detail::OneBitExchange> exchange;
  if (exchanges(plan)) {
    exchange = std::make_unique<detail::OneBitExchange>(world_, detail::counts_of(tensors), plan.compression);
  }
  const kernels::UpdateRule rule = traits().settings(defaults()).kernel.rule;
  return std::make_unique<detail::OneBitPart>(std::move(tensors), std::move(exchange), plan.variance_floor,
                                              rule, world_->device());
}

NamedTensors OneBitOptimizer::export_state() const {
  NamedTensors state = FusedOptimizer::export_state();
  state[kAttempts] = number_tensor(attempts_);
  state[kFrozenAt] = number_tensor(frozen_at_.value_or(-1));
  state[kFreezeIsDue] = number_tensor(freeze_is_due_);
  if (rule_) state[kNorms] = at::tensor(rule_->norms(), at::kDouble);
  if (!part_) return state;
  if (part_->compresses()) part_->exchange().check(/*wait=*/true);
  part_->export_shared(state);
  return state;
}

NamedTensors OneBitOptimizer::export_rank_state() const {
  NamedTensors state;
  if (!part_) return state;
  part_->export_errors(state);
  if (part_->compresses()) add_rank(route(*plan_), state);
  return state;
}

NamedTensors OneBitOptimizer::join_rank_states(const std::vector<NamedTensors>& rank_states) const {
  const bool any = std::any_of(rank_states.begin(), rank_states.end(),
                               [](const NamedTensors& state) { return !state.empty(); });
  const auto tensors = detail::onebit_tensors(view(), settings());
  NamedTensors joined;
  const bool exchanges_now = exchanges(*plan_);
  if (!any && !exchanges_now) return joined;
  const detail::OneBitRoute route = this->route(*plan_);
  if (exchanges_now) add_rank(route, joined);
  const kernels::OneBitLayout layout(detail::counts_of(tensors), route.workers(),
                                     detail::exchange_alignment(plan_->compression));
  const std::vector<NamedTensors> states = states_of_workers(rank_states);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    const detail::JoinedErrors errors = detail::join_errors(states, tensors[i]);
    if (!exchanges_now) {
      joined[name + "/momentum_error"] = errors.worker.add(errors.server).to(at::kFloat);
      continue;
    }
    joined[name + "/worker_error"] = errors.worker.to(at::kFloat);
    detail::add_strides(name, tensors[i].sizes, tensors[i].strides, joined);
    const auto part = layout.served_part(i, route.worker());
    if (part.begin == part.end) continue;
    joined[name + "/server_error"] = detail::in_memory_order(errors.server, tensors[i])
                                         .narrow(0, part.begin, part.end - part.begin)
                                         .to(at::kFloat);
  }
  return joined;
}

SessionOptimizer::PreparedImport OneBitOptimizer::prepare_import(const NamedTensors& saved,
                                                                 const NamedTensors& rank_state) {
  const at::NoGradGuard no_grad;
  NamedTensors state = saved;
  const auto attempts = require_number<int64_t>(state, kAttempts);
  const auto frozen_at = require_number<int64_t>(state, kFrozenAt);
  const auto freeze_is_due = require_number<bool>(state, kFreezeIsDue);
  require(attempts >= 0 && frozen_at >= -1 && frozen_at <= attempts && frozen_at != 0, "\"", kFrozenAt,
          "\" and \"", kAttempts, "\" of the state to load are ", frozen_at, " and ", attempts,
          ", which cannot be");
  std::vector<double> norms;
  if (rule_) {
    const at::Tensor tensor = require_tensor(state, kNorms);
    require(tensor.scalar_type() == at::kDouble && tensor.dim() == 1, "\"", kNorms,
            "\" of the state to load is no list of numbers");
    const at::Tensor dense = tensor.contiguous();
    norms.assign(dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel());
    state.erase(kNorms);
  }
  for (const char* key : {kAttempts, kFrozenAt, kFreezeIsDue}) state.erase(key);

  const NamedTensors of_rule = detail::take_lamb_state(state);
  detail::PendingState pending = detail::import_state(state, view());
  const auto settings = detail::check_pending(pending, view()), here = this->settings();
  for (size_t g = 0; g < settings.size(); ++g) {
    require(settings[g].compress == here[g].compress, "parameter group ", g,
            " is compressed here or in the state to load, but not in both; build the same groups");
  }
  const detail::OneBitPlan plan = plan_for(settings);
  require(plan.freeze_automatically.has_value() == (rule_ != nullptr),
          "the state to load freezes by another rule than this optimizer; give freeze_step or "
          "freeze_automatically as in the run that was saved");
  std::unique_ptr<FreezeRule> rule;
  if (plan.freeze_automatically) {
    rule = std::make_unique<FreezeRule>(*plan.freeze_automatically, plan.beta2);
    rule->set_norms(std::move(norms));
  }
  std::unique_ptr<detail::OneBitPart> part;
  if (frozen_at > 0) {
    detail::check_compressible(name(), param_groups_, settings, names());
    const detail::OneBitStates states = detail::onebit_states(view(), settings, pending.states);
    part = make_part(detail::onebit_tensors(view(), settings), plan);
    const NamedTensors errors = part->compresses() ? errors_of_rank(route(plan), rank_state) : rank_state;
    part->go_on(states, errors, detail::errors_version(rank_state), of_rule);
  } else {
    require(rank_state.empty(), "the state to load has errors of a 1-bit exchange, but no frozen variance");
    require(of_rule.empty(), "the state to load has \"", of_rule.empty() ? "" : of_rule.begin()->first,
            "\", which only a frozen OneBitLamb has, but no frozen variance");
  }
  struct Ready {  // in a shared_ptr, because a std::function is copied
    detail::PendingState pending;
    std::unique_ptr<detail::OneBitPart> part;
    std::unique_ptr<FreezeRule> rule;
  };
  const auto ready = std::make_shared<Ready>(Ready{std::move(pending), std::move(part), std::move(rule)});
  return [this, ready, plan, attempts, frozen_at, freeze_is_due] {
    commit(std::move(ready->pending));
    engine().compress_with(ready->part.get());
    part_ = std::move(ready->part);
    rule_ = std::move(ready->rule);
    *plan_ = plan;
    attempts_ = attempts;
    frozen_at_ = frozen_at > 0 ? std::optional<int64_t>(frozen_at) : std::nullopt;
    freeze_is_due_ = freeze_is_due;
    has_agreed_ = false;
    announce_phase();
  };
}

void OneBitOptimizer::save(torch::serialize::OutputArchive& /*archive*/) const {
  throw InvalidArgument(
      detail::concatenate(name(),
                          " cannot be saved to one archive, because each rank has errors of its own; use the "
                          "Checkpoints of a Session, or export_state and export_rank_state"));
}
void OneBitOptimizer::load(torch::serialize::InputArchive& /*archive*/) {
  throw InvalidArgument(
      detail::concatenate(name(),
                          " cannot be loaded from one archive, because each rank has errors of its own; use "
                          "the Checkpoints of a Session, or import_states"));
}

}  // namespace pacer
