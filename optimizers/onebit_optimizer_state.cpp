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
// Of each compressed parameter, the first element of this rank's part of its node's errors; absent where
// ranks have all of them.
constexpr const char* kParts = "onebit/first_of_parts";

// Errors are those of one rank of so many, even where chunks of other worlds have the same size.
void add_rank(const detail::OneBitRoute& route, NamedTensors& state) {
  state[kRank] = number_tensor(static_cast<int64_t>(route.world().rank()));
  state[kWorldSize] = number_tensor(static_cast<int64_t>(route.world().world_size()));
  state[kMates] = number_tensor(route.mates());
  state[detail::kErrorsVersion] = number_tensor(detail::kStateVersion);
}

// Of what export_rank_state wrote, what is not an error.
void remove_marks(NamedTensors& state) {
  for (const char* key : {kRank, kWorldSize, kMates, kParts, detail::kErrorsVersion}) state.erase(key);
}

// False also for a state of another optimizer, which prepare_import refuses.
bool is_frozen(const NamedTensors& state) {
  return state.count(kFrozenAt) != 0 && require_number<int64_t>(state, kFrozenAt) > 0;
}

at::Tensor first_of_parts(const std::vector<detail::OneBitTensor>& tensors, const Communicator& sharers) {
  std::vector<int64_t> first;
  for (const auto& tensor : tensors) first.push_back(tensor.bounds[static_cast<size_t>(sharers.rank())]);
  return at::tensor(first, at::kLong);
}

// Each of these has a part of its node's.
void add_parts(const std::vector<detail::OneBitTensor>& tensors, const Communicator& sharers,
               NamedTensors& state) {
  state[kMates] = number_tensor(static_cast<int64_t>(sharers.world_size()));
  state[kParts] = first_of_parts(tensors, sharers);
}

// Whether the errors of such a state are those of these parts, or of whole tensors where there are no
// sharers.
bool has_same_parts(const NamedTensors& state, const std::vector<detail::OneBitTensor>& tensors,
                    const Communicator* sharers) {
  const auto parts = state.find(kParts);
  if (parts == state.end() || sharers == nullptr) return parts == state.end() && sharers == nullptr;
  if (!parts->second.equal(first_of_parts(tensors, *sharers))) return false;
  return std::all_of(tensors.begin(), tensors.end(), [&](const detail::OneBitTensor& tensor) {
    for (const char* field : {"/worker_error", "/momentum_error"}) {
      const auto error = state.find(tensor.name + field);
      if (error != state.end() && error->second.numel() != tensor.count) return false;
    }
    return true;
  });
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
  return state;
}

// Of ranks that share their errors, the first; of those that have parts of them, all together.
std::vector<NamedTensors> states_of_workers(const std::vector<NamedTensors>& rank_states,
                                            const std::vector<detail::OneBitTensor>& whole) {
  std::vector<NamedTensors> states;
  if (!rank_states.empty() && rank_states.front().count(kParts) != 0) {
    const auto mates = require_number<int64_t>(rank_states.front(), kMates);
    require(mates >= 1 && static_cast<int64_t>(rank_states.size()) % mates == 0, "\"", kMates,
            "\" of the state to load is ", mates, ", which cannot be with ", rank_states.size(), " ranks");
    return detail::whole_errors(rank_states, mates, whole);
  }
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
    exchange =
        std::make_unique<detail::OneBitExchange>(route(plan), detail::counts_of(tensors), plan.compression);
  }
  const kernels::UpdateRule rule = traits().settings(defaults()).kernel.rule;
  return std::make_unique<detail::OneBitPart>(std::move(tensors), std::move(exchange), plan.variance_floor,
                                              rule, world_->device(), sharers_);
}

NamedTensors OneBitOptimizer::export_state() const {
  require_intact();
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
  require_intact();
  NamedTensors state;
  if (!part_) return state;
  part_->export_errors(state);
  if (part_->compresses()) add_rank(route(*plan_), state);
  if (sharers_ && !state.empty()) add_parts(detail::onebit_tensors(view(), settings()), *sharers_, state);
  return state;
}

detail::OneBitPlan OneBitOptimizer::saved_plan(const NamedTensors& state) const {
  return plan_for(detail::saved_settings(state, view()));
}

bool OneBitOptimizer::fits_rank_state(const NamedTensors& state, const NamedTensors& rank_state) const {
  if (!is_frozen(state)) return true;
  const detail::OneBitPlan plan = saved_plan(state);
  const bool exchanges_now = exchanges(plan);
  if (rank_state.empty()) return !exchanges_now;
  const bool exchanged = rank_state.count(kRank) != 0;
  if (exchanged != exchanges_now) return false;
  if (exchanged && require_number<int64_t>(rank_state, kMates) != route(plan).mates()) return false;
  return has_same_parts(rank_state, detail::onebit_tensors(view(), settings()), sharers_.get());
}

NamedTensors OneBitOptimizer::join_rank_states(const NamedTensors& state,
                                               const std::vector<NamedTensors>& rank_states) const {
  if (!is_frozen(state)) return {};
  const detail::OneBitPlan plan = saved_plan(state);
  const bool any = std::any_of(rank_states.begin(), rank_states.end(),
                               [](const NamedTensors& state) { return !state.empty(); });
  const auto tensors = detail::onebit_tensors(view(), settings());
  const auto whole = detail::onebit_tensors(view(), settings(), /*whole=*/true);
  NamedTensors joined;
  const bool exchanges_now = exchanges(plan);
  if (!any && !exchanges_now) return joined;
  const detail::OneBitRoute route = this->route(plan);
  if (exchanges_now) add_rank(route, joined);
  if (sharers_) add_parts(tensors, *sharers_, joined);
  const kernels::OneBitLayout layout(detail::counts_of(tensors), route.workers(),
                                     detail::exchange_alignment(plan.compression));
  const std::vector<NamedTensors> states = states_of_workers(rank_states, whole);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    detail::JoinedErrors errors = detail::join_errors(states, whole[i]);
    if (!tensors[i].bounds.empty()) {
      const int64_t first = tensors[i].bounds[static_cast<size_t>(sharers_->rank())];
      errors.worker = errors.worker.reshape({-1}).narrow(0, first, tensors[i].count);
      errors.server = errors.server.reshape({-1}).narrow(0, first, tensors[i].count);
    }
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

  NamedTensors of_rule = detail::take_lamb_state(state);
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
    const auto tensors = detail::onebit_tensors(view(), settings);
    if (sharers_) {
      const auto whole = detail::onebit_tensors(view(), settings, /*whole=*/true);
      detail::cut_lamb_state(tensors, whole, sharers_->rank(), of_rule);
    }
    part = make_part(tensors, plan);
    NamedTensors errors = rank_state;
    if (part->compresses()) errors = errors_of_rank(route(plan), std::move(errors));
    require(
        rank_state.empty() || has_same_parts(rank_state, tensors, sharers_.get()),
        "the state to load has errors of other parts of the parameters than this rank has; resume through "
        "join_rank_states");
    remove_marks(errors);
    part->go_on(states, errors, detail::errors_version(rank_state), of_rule);
    if (!sharers_) part->set_floors();
  } else {
    require(rank_state.empty(), "the state to load has errors of a 1-bit exchange, but no frozen variance");
    require(of_rule.empty(), "the state to load has \"", of_rule.empty() ? "" : of_rule.begin()->first,
            "\", which only a frozen OneBitLamb has, but no frozen variance");
  }
  struct Ready {  // in a shared_ptr, because a std::function is copied
    detail::PendingState pending;
    std::unique_ptr<detail::OneBitPart> part;
    std::unique_ptr<FreezeRule> rule;
    detail::OneBitPlan plan;
  };
  const auto ready =
      std::make_shared<Ready>(Ready{std::move(pending), std::move(part), std::move(rule), plan});
  return [this, ready, attempts, frozen_at, freeze_is_due] {
    commit(std::move(ready->pending));
    engine().compress_with(ready->part.get());
    part_ = std::move(ready->part);
    rule_ = std::move(ready->rule);
    *plan_ = std::move(ready->plan);
    attempts_ = attempts;
    frozen_at_ = frozen_at > 0 ? std::optional<int64_t>(frozen_at) : std::nullopt;
    freeze_is_due_ = freeze_is_due;
    has_agreed_ = false;
    failure_.clear();
    announce_phase();
    if (part_ && sharers_) to_the_end([this] { part_->set_floors(); });  // they are all here
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
