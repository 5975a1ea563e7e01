#include <pacer/checkpoints/checkpoints.h>

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/checkpoints/detail/checkpoint_save.h>
#include <pacer/checkpoints/detail/frozen_weights.h>
#include <pacer/checkpoints/detail/host_snapshot.h>
#include <pacer/checkpoints/detail/joint_saves.h>
#include <pacer/checkpoints/detail/stop_signals.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/folder_lock.h>
#include <pacer/hooks/detail/epoch_sampler_hook.h>
#include <pacer/hooks/detail/torch_optimizer_state.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>
#include <pacer/modules/deferred.h>

namespace pacer {

Checkpoints::Checkpoints(CheckpointsOptions options) : options_(std::move(options)) {
  std::string& folder = options_.folder();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  require(!folder.empty(), "Checkpoints needs the name of a folder");
  require(options_.every() >= 1, "Checkpoints: every must be at least 1 step, not ", options_.every());
  require(options_.keep() >= 1, "Checkpoints: keep must be at least 1, not ", options_.keep());
}

Checkpoints::~Checkpoints() {
  if (joint_) joint_->remove(*this);
}
Checkpoints::Checkpoints(Checkpoints&&) noexcept = default;

void Checkpoints::attach(SessionParts& parts) {
  require(
      parts.session_optimizer() != nullptr || detail::can_export(parts.optimizer()),
      "Checkpoints cannot save the state of this optimizer by parameter name; use one of pacer's, or torch's "
      "Adam, AdamW, SGD, RMSprop or Adagrad");
  parts_ = &parts;
  parts.load_checkpoint = [this](std::optional<int64_t> step) {
    if (!step) return load_newest();
    load_step(*step);
    return step;
  };
  parts.saved_steps = [this] { return saved_steps(); };
  parts.saves_frozen = options_.save_frozen();
  snapshot_ = std::make_unique<detail::HostSnapshot>();
  warns_of_not_finite_ = OnceOnFirstRank(parts.is_first_rank());
  warns_of_sampler_ = OnceOnFirstRank(parts.is_first_rank());
  if (options_.stop_on_signal()) parts.asks_to_stop = [] { return detail::StopSignals::requested(); };
}

std::string Checkpoints::agreement() const {
  return detail::concatenate("every ", options_.every(), " steps, the newest ", options_.keep(), " kept, ",
                             options_.synchronous() ? "synchronous" : "beside training",
                             options_.save_frozen() ? "" : ", without frozen weights",
                             options_.stop_on_signal() ? ", stops on signals" : "");
}

void Checkpoints::arrange() {
  const ShardedState* sharded = parts_->sharded_state;
  const bool shares_parameters = sharded && sharded->shares_parameters() && parts_->world().world_size() > 1;
  require(options_.save_frozen() || !shares_parameters,
          "Checkpoints cannot leave frozen weights out while ranks keep parts of the parameters; leave "
          "save_frozen(false) out");
  const std::vector<at::Tensor> parameters = parts_->model().parameters();
  require(options_.save_frozen() || std::none_of(parameters.begin(), parameters.end(), is_deferred),
          "Checkpoints cannot leave frozen weights out of a model whose blocks were deferred; leave "
          "save_frozen(false) out");
  const NamedTensors model = detail::saved_model(*parts_);
  detail::check_storable(model);
  detail::check_writable(model);
}

void Checkpoints::start(const Progress& /*progress*/) {
  check_folder();
  if (!options_.save_frozen()) {
    // Since a checkpoint was loaded, weights may have been frozen or unfrozen.
    if (was_loaded_) {
      check_frozen();
    } else {
      frozen_checksum_ = detail::frozen_checksum(*parts_);
      remember_versions();
    }
  }
  if (options_.stop_on_signal() && !stop_signals_) stop_signals_ = std::make_unique<detail::StopSignals>();
}

void Checkpoints::save(NamedTensors& state) const {
  if (options_.save_frozen()) return;
  if (!frozen_checksum_.defined()) frozen_checksum_ = detail::frozen_checksum(*parts_);
  state["frozen"] = frozen_checksum_;
}

void Checkpoints::load(const NamedTensors& state) {
  if (options_.save_frozen()) return;
  NamedTensors own;
  save(own);
  require(own.at("frozen").equal(state.at("frozen")),
          "the frozen weights of this model are not those that the run was trained with; load those, freeze "
          "the same ones, and then resume");
  remember_versions();
  was_loaded_ = true;
}

void Checkpoints::remember_versions() {
  first_versions_ = detail::model_versions(*parts_);
  frozen_versions_ = detail::frozen_versions(*parts_);
}

// What is left out must be what the run began with, or nobody could resume it. Weights that were unfrozen
// since, or frozen before they were trained, are another set, which is compared from now on.
void Checkpoints::check_frozen() {
  if (options_.save_frozen()) return;
  detail::TensorVersions versions = detail::frozen_versions(*parts_);
  if (versions == frozen_versions_) return;
  for (const auto& [name, version] : versions) {
    const auto first = first_versions_.find(name);
    require(frozen_versions_.count(name) > 0 || first == first_versions_.end() || first->second == version,
            "the weight ", name,
            " was trained and then frozen, so that save_frozen(false) would leave it out of checkpoints and "
            "no run could go on from them; leave save_frozen(false) out, or let it require a gradient until "
            "the run ends");
  }
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  const bool same_set = std::equal(versions.begin(), versions.end(), frozen_versions_.begin(),
                                   frozen_versions_.end(), same_name);
  const at::Tensor checksum = detail::frozen_checksum(*parts_);
  if (same_set && !checksum.equal(frozen_checksum_)) {
    const auto changed = std::mismatch(versions.begin(), versions.end(), frozen_versions_.begin()).first;
    throw InvalidArgument(detail::concatenate(
        "the weight ", changed->first,
        " changes in training although it requires no gradient, and save_frozen(false) leaves it out of "
        "checkpoints, so that no run could go on from them; leave save_frozen(false) out"));
  }
  frozen_checksum_ = checksum;
  frozen_versions_ = std::move(versions);
}

// Before anything is trained or saved: checkpoints of another run are not to be mixed with this one's, nor
// does another run write there. The folder is made here, so that one that cannot be made is found now.
void Checkpoints::check_folder() {
  if (folder_is_locked_) return;
  on_all_ranks_or_none("start training", [&]() -> std::string {
    if (parts_->world().rank() != 0) return "";
    std::vector<CheckpointInfo> older;
    if (!folder_is_checked_) older = list_checkpoints(options_.folder());
    require(older.empty(), "the folder ", options_.folder(), " has checkpoints of another run, the newest ",
            older.empty() ? "" : older.front().folder,
            "; call session.resume() to go on from them, or choose another folder");
    make_folders(posix_file_system(), options_.folder());
    lock_ = std::make_unique<FolderLock>(options_.folder(), "checkpoints",
                                         FolderLock::resuming(folder_is_checked_));
    return "";
  });
  folder_is_checked_ = folder_is_locked_ = true;
}

void Checkpoints::after_step(StepReport& report) {
  constexpr int64_t kEarlySteps = 10;
  if (steps_taken_ == 0 && !parts_->counts_examples && detail::sampler_is_unseen() &&
      warns_of_sampler_.take()) {
    TORCH_WARN(
        "an EpochSampler hands out the examples, but this Session does not know it, so that a resumed run "
        "would begin the epoch anew; add session.use(sampler)");
  }
  if (++steps_taken_ <= kEarlySteps) check_frozen();
  // With several ranks, DataParallel has told them all in this step.
  if (parts_->world().world_size() == 1 && parts_->asks_to_stop && parts_->asks_to_stop()) {
    parts_->should_stop = true;
  }
  if (parts_->should_stop && parts_->stop_reason.empty()) parts_->stop_reason = "a signal asked for it";
  const bool stops = parts_->should_stop && !std::exchange(stop_was_seen_, true);
  const bool is_due = stops || report.progress().step % options_.every() == 0;
  if (joint_) {
    joint_->after_step(*this, is_due, stops);
  } else if (stops) {
    save_now();
  } else if (is_due) {
    begin_save();
  }
}

void Checkpoints::finish(const Progress& progress) {
  complete_save();
  if (joint_) return joint_->finish(*this);
  if (progress.step > 0 && progress.step != saved_step_) save_now();
  unlock();
}

void Checkpoints::unlock() {
  lock_.reset();
  folder_is_locked_ = false;
}

std::vector<std::string> Checkpoints::on_all_ranks_or_none(const char* action,
                                                           const std::function<std::string()>& f) const {
  return detail::on_all_ranks_or_none(parts_->world(), options_.timeout(), action, f);
}

}  // namespace pacer
