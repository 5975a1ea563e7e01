// How Checkpoints saves: what is asked of the ranks, in which order, and what becomes of a save under way.
#include <cstdio>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/checkpoint_save.h>
#include <pacer/checkpoints/detail/host_snapshot.h>
#include <pacer/checkpoints/detail/joint_saves.h>
#include <pacer/checkpoints/detail/stage_state.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/agreement.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/folder_lock.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer {

std::string Checkpoints::save_now() {
  if (joint_) {
    joint_->save_now();
    return saved_folder_;
  }
  begin_save();
  return complete_save();
}

// Returns when this rank's state may change again.
void Checkpoints::begin_save(const std::string& text) {
  require(parts_ != nullptr, "Checkpoints::save_now needs the hook in a Session; call session.use first");
  require(parts_->progress.micro_step == 0,
          "Checkpoints::save_now belongs between steps, not into an accumulation window");
  Communicator& world = parts_->world();
  detail::SaveJob job;
  job.step = parts_->progress.step;
  job.rank = world.rank();
  job.facts = {world.world_size(), version(), {{"libtorch", TORCH_VERSION}}};
  job.timeout = options_.timeout();
  job.root = options_.folder();
  job.keep = options_.keep();
  job.stays = stays_;
  std::unordered_set<std::string> trained;
  // A mask may well hold -inf. What has state was trained, also while a GAN's loop has it frozen for the other network.
  const auto& states = parts_->optimizer().state();
  for (const auto& item : parts_->model().named_parameters()) {
    const bool has_state = states.count(item.value().unsafeGetTensorImpl()) > 0;
    if (item.value().requires_grad() || has_state) trained.insert(item.key());
  }
  job.must_be_finite = [trained = std::move(trained)](const std::string& name) {
    return trained.count(name) != 0;
  };
  RankStatus status;
  status.intent = Intent::save;
  status.step = job.step;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  check_folder();
  complete_save();

  job.staging = on_all_ranks_or_none("begin a checkpoint", [&]() -> std::string {
                  if (world.rank() != 0) return "";
                  lock_->check();
                  job.writer = std::make_unique<CheckpointWriter>(posix_file_system(), job.root, job.step);
                  return job.writer->staging();
                }).front();
  const ShardedState* sharded = parts_->sharded_state;
  const bool has_stages = parts_->replicas != nullptr;
  detail::TrainingState state;
  NamedTensors of_optimizer;
  const std::vector<std::string> fingerprints = on_all_ranks_or_none("write its part of a checkpoint", [&] {
    check_frozen();
    state = detail::export_state(*parts_);
    of_optimizer = state.optimizer;
    if (sharded) state.optimizer = sharded->whole_specs(std::move(state.optimizer));
    return has_stages ? detail::listing_of(state) : detail::fingerprint_of(state.optimizer);
  });
  for (size_t rank = 1; rank < fingerprints.size() && !has_stages; ++rank) {
    require(fingerprints[rank] == fingerprints[0], "the optimizer of rank ", rank,
            " has state of other names, dtypes or shapes than that of rank 0, so that no checkpoint can hold "
            "both; give all ranks the same model and the same steps");
  }
  const detail::WriterOfTensor writers =
      has_stages ? detail::complete_stages(state, fingerprints, parts_->data_ranks().world_size())
                 : detail::writers_of(state, world.world_size(),
                                      /*deals_model_out=*/sharded && sharded->keeps_parts());
  job.texts = detail::texts_of_rank(state.model, writers, world);
  if (!text.empty() && world.rank() == 0) job.texts.emplace_back(detail::kJointFile, text);
  if (sharded) {
    state.optimizer = sharded->gather_state(
        std::move(of_optimizer), [&](const std::string& name) { return writers.optimizer.at(name); });
    state.model = sharded->gather_model(std::move(state.model),
                                        [&](const std::string& name) { return writers.model.at(name); });
  }
  detail::TensorsByFile files;
  on_all_ranks_or_none("write its part of a checkpoint", [&] {
    files = detail::tensors_of_rank(std::move(state), writers, world);
    if (!options_.synchronous()) files = snapshot_->take(files);
    world.check();  // what is written is what training computed, not the remains of a broken exchange
    return std::string();
  });
  auto save = std::make_unique<detail::CheckpointSave>(std::move(job));
  if (options_.synchronous()) {
    save->write_here(files, [&] { world.check(); });
  } else {
    save->write_in_thread(std::move(files));
  }
  saving_text_ = text;
  saving_ = std::move(save);  // only now: nobody waits for a thread that did not start
  if (options_.synchronous()) complete_save();
}

// Waits for the save under way, if there is one; the folder of what is then the newest checkpoint.
std::string Checkpoints::complete_save() {
  if (saving_) {
    const auto save = std::move(saving_);
    try {
      on_all_ranks_or_none("write its part of a checkpoint", [&] {
        save->wait_until_written();
        return std::string();
      });
    } catch (...) {
      save->give_up();
      throw;
    }
    saved_folder_ = on_all_ranks_or_none("complete a checkpoint", [&] { return save->wait(); }).front();
    saved_step_ = save->step();
    saved_text_ = saving_text_;
    saved_is_finite_ = save->is_finite();
    if (save->is_finite()) {
      warns_of_not_finite_.renew();
    } else if (warns_of_not_finite_.take()) {
      TORCH_WARN("trained parameters in the checkpoint ", saved_folder_,
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

}  // namespace pacer
