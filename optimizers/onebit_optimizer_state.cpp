// The state of the 1-bit optimizers: what a freeze starts from, and what checkpoints hold.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/freeze_rule.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/onebit_rank_state.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/saved_by.h>
#include <pacer/optimizers/detail/step_across_ranks.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {
namespace {

constexpr const char* kAttempts = "onebit/attempts";
constexpr const char* kFrozenAt = "onebit/frozen_at";  // -1: not yet
constexpr const char* kFreezeIsDue = "onebit/freeze_is_due";
constexpr const char* kNorms = "onebit/variance_norms";
constexpr int64_t kCompressVectorsSince = 3;  // the version of states that say it

// False also for a state of another optimizer, which prepare_import refuses.
bool is_frozen(const NamedTensors& state) {
  return state.count(kFrozenAt) != 0 && require_number<int64_t>(state, kFrozenAt) > 0;
}

}  // namespace

NamedTensors OneBitOptimizer::export_state() const {
  require_nothing_in_flight();
  NamedTensors state = FusedOptimizer::export_state();
  state[kAttempts] = number_tensor(attempts_);
  state[kFrozenAt] = number_tensor(frozen_at_.value_or(-1));
  state[kFreezeIsDue] = number_tensor(warm_up_.freeze_is_due);
  if (warm_up_.rule) state[kNorms] = at::tensor(warm_up_.rule->norms(), at::kDouble);
  if (!compressed()) return state;
  for (const auto& bucket : compressed()->buckets()) bucket->export_shared(state);
  return state;
}

NamedTensors OneBitOptimizer::export_rank_state() const {
  require_nothing_in_flight();
  NamedTensors state;
  if (!compressed()) return state;
  for (const auto& bucket : compressed()->buckets()) bucket->export_errors(state);
  const auto tensors = detail::onebit_tensors(view(), settings());
  if (compressed()->compresses()) {
    detail::add_rank(onebit_->route, onebit_->first_of_buckets(tensors), state);
  }
  if (shard_ranks_ && !state.empty()) detail::add_parts(tensors, *shard_ranks_, state);
  return state;
}

// A state of before version 3 compresses vectors, and goes on with that once its variance is frozen.
NamedTensors OneBitOptimizer::completed(const NamedTensors& saved) const {
  NamedTensors state = saved;
  const bool is_older = detail::version_of(saved) < kCompressVectorsSince;
  for (size_t g = 0; is_older && is_frozen(saved) && g < param_groups_.size(); ++g) {
    state.emplace(detail::concatenate("group/", g, "/compress_vectors"), number_tensor(true));
  }
  return state;
}

bool OneBitOptimizer::fits_rank_state(const NamedTensors& state, const NamedTensors& rank_state) const {
  if (!is_frozen(state)) return true;
  const auto settings = detail::saved_settings(completed(state), view());
  const detail::OneBitSetup onebit = setup_for(settings);
  if (rank_state.empty()) return !onebit.exchanges();
  const bool exchanged = detail::has_exchanged(rank_state);
  if (exchanged != onebit.exchanges()) return false;
  if (exchanged && detail::ranks_per_worker_of(rank_state) != onebit.route.ranks_per_worker()) return false;
  const auto tensors = detail::onebit_tensors(view(), settings);
  return detail::has_same_parts(rank_state, tensors, shard_ranks_.get()) &&
         detail::has_buckets(rank_state, onebit.first_of_buckets(tensors));
}

NamedTensors OneBitOptimizer::join_rank_states(const NamedTensors& state,
                                               const std::vector<NamedTensors>& rank_states) const {
  if (!is_frozen(state)) return {};
  const auto settings = detail::saved_settings(completed(state), view());
  const detail::OneBitSetup onebit = setup_for(settings);
  const bool any = std::any_of(rank_states.begin(), rank_states.end(),
                               [](const NamedTensors& state) { return !state.empty(); });
  const auto tensors = detail::onebit_tensors(view(), settings);
  const auto whole = detail::onebit_tensors(view(), settings, /*whole=*/true);
  NamedTensors joined;
  const bool exchanges_now = onebit.exchanges();
  if (!any && !exchanges_now) return joined;
  const detail::OneBitRoute& route = onebit.route;
  const std::vector<int64_t> buckets = onebit.first_of_buckets(tensors);
  if (exchanges_now) detail::add_rank(route, buckets, joined);
  if (shard_ranks_) detail::add_parts(tensors, *shard_ranks_, joined);
  std::vector<kernels::OneBitLayout::Part> served;  // of each tensor
  for (const auto& of_bucket : detail::cut(tensors, buckets)) {
    const kernels::OneBitLayout layout(detail::counts_of(of_bucket), route.workers(),
                                       detail::exchange_alignment(onebit.compression()));
    for (size_t i = 0; i < of_bucket.size(); ++i) served.push_back(layout.served_part(i, route.worker()));
  }
  const std::vector<NamedTensors> states = detail::states_of_workers(rank_states, whole);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    detail::JoinedErrors errors = detail::join_errors(states, whole[i]);
    if (!tensors[i].bounds.empty()) {
      const int64_t first = tensors[i].bounds[static_cast<size_t>(shard_ranks_->rank())];
      errors.worker = errors.worker.reshape({-1}).narrow(0, first, tensors[i].count);
      errors.server = errors.server.reshape({-1}).narrow(0, first, tensors[i].count);
    }
    if (!exchanges_now) {
      joined[name + "/momentum_error"] = errors.worker.add(errors.server).to(at::kFloat);
      continue;
    }
    detail::add_errors(errors, tensors[i], served[i], joined);
  }
  return joined;
}

void OneBitOptimizer::require_same_local(const std::vector<torch::Tensor>& parameters) const {
  const auto keys_of = [](const std::vector<torch::Tensor>& tensors) {
    std::unordered_set<const void*> keys;
    for (const torch::Tensor& tensor : tensors) keys.insert(tensor.unsafeGetTensorImpl());
    return keys;
  };
  const auto here = keys_of(local_parameters()), loaded = keys_of(parameters);
  for (const detail::RegisteredParameter& parameter : view().parameters()) {
    require(here.count(parameter.key()) == loaded.count(parameter.key()), "parameter ",
            parameter.in_message(),
            " is compressed here or in the state to load, but not in both, and ranks have shared out their "
            "work by that already; give compress_vectors, compress_alone and one_bit as in the run that was "
            "saved (one that was frozen before compress_vectors existed has it true)");
  }
}

SessionOptimizer::PreparedImport OneBitOptimizer::prepare_import(const NamedTensors& saved,
                                                                 const NamedTensors& rank_state) {
  const at::NoGradGuard no_grad;
  if (const std::string by = detail::saved_by(saved); !by.empty()) detail::require_same_optimizer(by, name());
  NamedTensors state = completed(saved);
  const auto attempts = require_number<int64_t>(state, kAttempts);
  const auto frozen_at = require_number<int64_t>(state, kFrozenAt);
  const auto freeze_is_due = require_number<bool>(state, kFreezeIsDue);
  require(attempts >= 0 && frozen_at >= -1 && frozen_at <= attempts && frozen_at != 0, "\"", kFrozenAt,
          "\" and \"", kAttempts, "\" of the state to load are ", frozen_at, " and ", attempts,
          ", which cannot be");
  std::vector<double> norms;
  if (warm_up_.rule) {
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
    require(settings[g].onebit.compress() == here[g].onebit.compress(), "parameter group ", g,
            " is compressed here or in the state to load, but not in both; build the same groups");
  }
  const detail::OneBitSetup onebit = setup_for(settings);
  if (shard_ranks_) require_same_local(local_parameters(onebit, settings));
  require(onebit.freeze_automatically().has_value() == (warm_up_.rule != nullptr),
          "the state to load freezes by another rule than this optimizer; give freeze_step or "
          "freeze_automatically as in the run that was saved");
  std::unique_ptr<detail::FreezeRule> rule;
  if (onebit.freeze_automatically()) {
    rule = std::make_unique<detail::FreezeRule>(*onebit.freeze_automatically(), onebit.beta2);
    rule->set_norms(std::move(norms));
  }
  std::unique_ptr<detail::CompressedParameters> loaded;
  if (frozen_at > 0) {
    detail::check_compressible(name(), param_groups_, settings, names());
    const detail::OneBitStates states = detail::onebit_states(view(), settings, pending.states);
    const auto tensors = detail::onebit_tensors(view(), settings);
    if (shard_ranks_) {
      const auto whole = detail::onebit_tensors(view(), settings, /*whole=*/true);
      detail::cut_lamb_state(tensors, whole, shard_ranks_->rank(), of_rule);
    }
    loaded = std::make_unique<detail::CompressedParameters>(tensors, onebit, shard_ranks_);
    NamedTensors errors = rank_state;
    if (loaded->compresses()) errors = detail::errors_of_rank(onebit.route, std::move(errors));
    require(
        rank_state.empty() || detail::has_same_parts(rank_state, tensors, shard_ranks_.get()),
        "the state to load has errors of other parts of the parameters than this rank has; resume through "
        "join_rank_states");
    require(
        rank_state.empty() || detail::has_buckets(rank_state, onebit.first_of_buckets(tensors)),
        "the state to load has errors that were cut by other buckets (\"onebit/first_of_buckets\") than this "
        "rank's; give bucket_bytes as in the run that was saved, or resume through join_rank_states");
    detail::remove_marks(errors);
    loaded->go_on(states, errors, detail::errors_version(rank_state), of_rule);
    if (!shard_ranks_) loaded->set_floors();
  } else {
    require(rank_state.empty(), "the state to load has errors of a 1-bit exchange, but no frozen variance");
    require(of_rule.empty(), "the state to load has \"", of_rule.empty() ? "" : of_rule.begin()->first,
            "\", which only a frozen OneBitLamb has, but no frozen variance");
  }
  struct Ready {  // in a shared_ptr, because a std::function is copied
    detail::PendingState pending;
    std::unique_ptr<detail::CompressedParameters> compressed;
    std::unique_ptr<detail::FreezeRule> rule;
    detail::OneBitSetup onebit;
  };
  const auto ready =
      std::make_shared<Ready>(Ready{std::move(pending), std::move(loaded), std::move(rule), onebit});
  return [this, ready, attempts, frozen_at, freeze_is_due] {
    commit(ready->pending);
    engine().compress_with(std::move(ready->compressed));
    warm_up_.rule = std::move(ready->rule);
    warm_up_.freeze_is_due = freeze_is_due;
    ahead_ = Ahead();
    alone_.across_ranks->forget();  // what is compressed may be other parameters
    *onebit_ = std::move(ready->onebit);
    attempts_ = attempts;
    frozen_at_ = frozen_at > 0 ? std::optional<int64_t>(frozen_at) : std::nullopt;
    failure_.clear();
    announce_phase();
    if (compressed() && shard_ranks_)
      mark_failed_if_throws([this] { compressed()->set_floors(); });  // they are all here
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
