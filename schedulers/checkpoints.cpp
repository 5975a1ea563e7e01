#include <pacer/schedulers/checkpoints.h>

#include <algorithm>
#include <cstdio>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <pacer/collectives/agreement.h>
#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/schedulers/detail/checkpoint_files.h>
#include <pacer/schedulers/detail/checkpoint_save.h>
#include <pacer/schedulers/detail/epoch_sampler_hook.h>
#include <pacer/schedulers/detail/foreign_state.h>
#include <pacer/schedulers/detail/frozen_weights.h>
#include <pacer/schedulers/detail/host_snapshot.h>
#include <pacer/schedulers/detail/pipeline_hook.h>
#include <pacer/schedulers/detail/stop_signals.h>
#include <pacer/schedulers/detail/tensor_file.h>
#include <pacer/schedulers/detail/together.h>
#include <pacer/schedulers/detail/training_state.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/shards.h>
#include <pacer/schedulers/step_report.h>

namespace pacer {

Checkpoints::Checkpoints(CheckpointsOptions options) : options_(std::move(options)) {
  std::string& folder = options_.folder();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  require(!folder.empty(), "Checkpoints needs the name of a folder");
  require(options_.every() >= 1, "Checkpoints: every must be at least 1 step, not ", options_.every());
  require(options_.keep() >= 1, "Checkpoints: keep must be at least 1, not ", options_.keep());
}

Checkpoints::~Checkpoints() = default;
Checkpoints::Checkpoints(Checkpoints&&) noexcept = default;

void Checkpoints::attach(SessionParts& parts) {
  require(
      parts.session_optimizer() != nullptr || detail::can_export(parts.optimizer()),
      "Checkpoints cannot save the state of this optimizer by parameter name; use one of pacer's, or torch's "
      "Adam, AdamW, SGD, RMSprop or Adagrad");
  parts_ = &parts;
  parts.saves_frozen = options_.save_frozen();
  snapshot_ = std::make_unique<detail::HostSnapshot>();
  warns_of_not_finite_ = OnceOnFirstRank(parts.is_first_rank());
  if (options_.stop_on_signal()) parts.asks_to_stop = [] { return detail::StopSignals::requested(); };
}

std::string Checkpoints::agreement() const {
  return detail::concatenate("every ", options_.every(), " steps, the newest ", options_.keep(), " kept, ",
                             options_.synchronous() ? "synchronous" : "beside training",
                             options_.save_frozen() ? "" : ", without frozen weights",
                             options_.stop_on_signal() ? ", stops on signals" : "");
}

void Checkpoints::arrange() {
  const NamedTensors model = detail::saved_model(*parts_);
  detail::check_storable(model);
  detail::check_writable(model);
}

void Checkpoints::start(const Progress& /*progress*/) {
  check_folder();
  if (!options_.save_frozen()) {
    NamedTensors own;
    save(own);
    frozen_versions_ = detail::frozen_versions(*parts_);
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
}

// What is left out must be what the run began with, or nobody could resume it. Weights that were frozen or
// unfrozen since are another set, which is compared from now on.
void Checkpoints::check_frozen() {
  if (options_.save_frozen()) return;
  auto versions = detail::frozen_versions(*parts_);
  if (versions == frozen_versions_) return;
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
  together("start training", [&]() -> std::string {
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
  if (steps_taken_ == 0 && parts_->find<detail::EpochSamplerHook>() == nullptr &&
      detail::sampler_is_unseen()) {
    TORCH_WARN(
        "an EpochSampler hands out the examples, but this Session does not know it, so that a resumed run "
        "would "
        "begin the epoch anew; add session.use(sampler)");
  }
  if (++steps_taken_ <= kEarlySteps) check_frozen();
  // With several ranks, DataParallel has told them all in this step.
  if (parts_->world().world_size() == 1 && parts_->asks_to_stop && parts_->asks_to_stop()) {
    parts_->should_stop = true;
  }
  if (parts_->should_stop && parts_->stop_reason.empty()) parts_->stop_reason = "a signal asked for it";
  if (parts_->should_stop && !std::exchange(stop_was_seen_, true)) {
    save_now();
  } else if (report.progress().step % options_.every() == 0) {
    begin_save();
  }
}

void Checkpoints::finish(const Progress& progress) {
  complete_save();
  if (progress.step > 0 && progress.step != saved_step_) save_now();
  lock_.reset();
  folder_is_locked_ = false;
}

std::vector<std::string> Checkpoints::together(const char* action,
                                               const std::function<std::string()>& f) const {
  return detail::together(parts_->world(), options_.timeout(), action, f);
}

std::string Checkpoints::save_now() {
  begin_save();
  return complete_save();
}

// Returns when this rank's state may change again.
void Checkpoints::begin_save() {
  require(parts_ != nullptr, "Checkpoints::save_now needs the hook in a Session; call session.use first");
  require(parts_->progress.micro_step == 0,
          "Checkpoints::save_now belongs between steps, not into an accumulation window");
  Communicator& world = parts_->world();
  detail::SavePlan plan;
  plan.step = parts_->progress.step;
  plan.rank = world.rank();
  plan.facts = {world.world_size(), version(), {{"libtorch", TORCH_VERSION}}};
  plan.timeout = options_.timeout();
  plan.root = options_.folder();
  plan.keep = options_.keep();
  std::unordered_set<std::string> parameters;
  for (const auto& item : parts_->model().named_parameters()) parameters.insert(item.key());
  plan.is_parameter = [parameters = std::move(parameters)](const std::string& name) {
    return parameters.count(name) != 0;
  };
  RankStatus status;
  status.intent = Intent::save;
  status.step = plan.step;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  check_folder();
  complete_save();
  together("write its part of a checkpoint", [&] {
    check_frozen();
    return std::string();
  });

  plan.staging = together("begin a checkpoint", [&]() -> std::string {
                   if (world.rank() != 0) return "";
                   lock_->check();
                   plan.writer =
                       std::make_unique<CheckpointWriter>(posix_file_system(), plan.root, plan.step);
                   return plan.writer->staging();
                 }).front();
  const Shards* shards = parts_->find<Shards>();
  require(options_.save_frozen() || !shards || !shards->keeps_parts(),
          "Checkpoints cannot leave frozen weights out while ranks keep parts of the parameters; leave "
          "save_frozen(false) out");
  detail::TrainingState state;
  NamedTensors of_optimizer;
  const auto* pipeline = parts_->find<detail::PipelineHook>();
  const std::vector<std::string> outlines = together("write its part of a checkpoint", [&] {
    state = detail::export_state(*parts_);
    of_optimizer = state.optimizer;
    if (shards) state.optimizer = shards->whole_outline(std::move(state.optimizer));
    return pipeline ? pipeline->listing(state) : detail::outline_of(state.optimizer);
  });
  for (size_t rank = 1; rank < outlines.size() && !pipeline; ++rank) {
    require(outlines[rank] == outlines[0], "the optimizer of rank ", rank,
            " has state of other names, dtypes or shapes than that of rank 0, so that no checkpoint can hold "
            "both; give all ranks the same model and the same steps");
  }
  const detail::Writers writers =
      pipeline ? pipeline->complete(state, outlines)
               : detail::writers_of(state, world.world_size(),
                                    /*deals_model_out=*/shards && shards->keeps_parts());
  plan.texts = detail::texts_of_rank(state.model, writers, world);
  if (shards) {
    state.optimizer = shards->gather_state(
        std::move(of_optimizer), [&](const std::string& name) { return writers.optimizer.at(name); });
    state.model = shards->gather_model(std::move(state.model),
                                       [&](const std::string& name) { return writers.model.at(name); });
  }
  detail::RankFiles files;
  together("write its part of a checkpoint", [&] {
    files = detail::files_of_rank(std::move(state), writers, world);
    if (!options_.synchronous()) files = snapshot_->take(files);
    world.check();  // what is written is what training computed, not the remains of a broken exchange
    return std::string();
  });
  auto save = std::make_unique<detail::CheckpointSave>(std::move(plan));
  if (options_.synchronous()) {
    save->write_here(files, [&] { world.check(); });
  } else {
    save->write_in_thread(std::move(files));
  }
  saving_ = std::move(save);  // only now: nobody waits for a thread that did not start
  if (options_.synchronous()) complete_save();
}

// Waits for the save under way, if there is one; the folder of what is then the newest checkpoint.
std::string Checkpoints::complete_save() {
  if (saving_) {
    const auto save = std::move(saving_);
    try {
      together("write its part of a checkpoint", [&] {
        save->wait_until_written();
        return std::string();
      });
    } catch (...) {
      save->give_up();
      throw;
    }
    saved_folder_ = together("complete a checkpoint", [&] { return save->wait(); }).front();
    saved_step_ = save->step();
    if (save->is_finite()) {
      warns_of_not_finite_.renew();
    } else if (warns_of_not_finite_.take()) {
      TORCH_WARN("parameters in the checkpoint ", saved_folder_,
                 " are not finite; the newest one with finite parameters stays, whatever is removed, and "
                 "session.resume() goes on from it; look for the first loss that was not finite");
    }
    say_what_stays(*save);
  }
  return saved_folder_;
}

// The checkpoint that was just saved is good, whatever becomes of the older ones.
void Checkpoints::say_what_stays(const detail::CheckpointSave& save) {
  for (const RemovalFailure& failure : save.not_removed()) {
    if (!not_removed_.insert(failure.step).second) continue;
    std::fprintf(stderr, "pacer: an old checkpoint stays until a later save can remove it: %s\n",
                 failure.reason.c_str());
  }
}

std::optional<int64_t> Checkpoints::load_newest() {
  require(parts_ != nullptr, "Checkpoints::load_newest needs the hook in a Session; call session.use first");
  Communicator& world = parts_->world();
  const Shards* shards = parts_->find<Shards>();
  require(!shards || !shards->keeps_parts(),
          "a checkpoint is loaded before ranks keep parts of the parameters; call session.resume() before "
          "prewarm and begin");
  RankStatus status;
  status.intent = Intent::load;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  complete_save();
  const std::string folder =
      together("find a checkpoint", [&] {
        return world.rank() == 0 ? detail::find_newest(options_.folder()) : std::string();
      }).front();
  folder_is_checked_ = folder_is_checked_ || !folder.empty();
  if (folder.empty() && world.rank() == 0) {
    std::fprintf(stderr, "pacer: there is no checkpoint in %s; the run begins at step 0\n",
                 options_.folder().c_str());
  }
  if (folder.empty()) return std::nullopt;

  // Every rank has read and checked all of it before any of them changes what cannot be put back.
  detail::TrainingState state;
  std::optional<detail::StateImport> import;
  const auto in_this_folder = [&](const auto& work) {
    return [&] {
      try {
        work();
      } catch (const InvalidArgument& error) {
        throw InvalidArgument(detail::concatenate("cannot resume from ", folder, ": ", error.what()));
      }
      return std::string();
    };
  };
  together("read the checkpoint", in_this_folder([&] { state = detail::read_state(*parts_, folder); }));
  together("continue from the checkpoint",
           in_this_folder([&] { import.emplace(*parts_, std::move(state)); }));
  import->commit();
  saved_step_ = parts_->progress.step;
  if (world.rank() == 0) {
    for (const std::string& note : {import->random_state_note(), import->micro_batches_note()}) {
      if (!note.empty()) std::fprintf(stderr, "pacer: %s\n", note.c_str());
    }
    std::fprintf(stderr, "pacer: resumed from %s, after step %lld\n", folder.c_str(),
                 static_cast<long long>(saved_step_));
  }
  return saved_step_;
}

}  // namespace pacer
