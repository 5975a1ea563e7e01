// How Checkpoints loads the newest checkpoint, or another one, on all ranks or on none.
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <utility>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/joint_saves.h>
#include <pacer/checkpoints/detail/pending_load.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/agreement.h>
#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer {

std::optional<int64_t> Checkpoints::load_newest() {
  return load_from([this] { return detail::find_newest(options_.folder()); });
}

void Checkpoints::load_step(int64_t step) {
  load_from([&] { return detail::find_step(options_.folder(), step); });
}

std::vector<int64_t> Checkpoints::saved_steps() const {
  require(parts_ != nullptr, "Checkpoints::saved_steps needs the hook in a Session; call session.use first");
  std::string steps = on_all_ranks_or_none("look for checkpoints", [&] {
                        return parts_->world().rank() == 0 ? detail::list_steps(options_.folder()) : "";
                      }).front();
  std::vector<int64_t> numbers;
  std::istringstream in(std::move(steps));
  for (int64_t step = 0; in >> step;) numbers.push_back(step);
  return numbers;
}

std::vector<detail::JointStep> Checkpoints::joint_steps() const {
  return detail::joint_steps_of(on_all_ranks_or_none("look for checkpoints", [&] {
                                  return parts_->world().rank() == 0
                                             ? detail::text_of(detail::list_joint_steps(options_.folder()))
                                             : std::string();
                                }).front());
}

std::optional<int64_t> Checkpoints::load_from(const std::function<std::string()>& find) {
  const auto load = prepare_load(find);
  if (!load && parts_->is_first_rank()) {
    std::fprintf(stderr, "pacer: there is no checkpoint in %s; the run begins at step 0\n",
                 options_.folder().c_str());
  }
  if (!load) return std::nullopt;
  commit_load(*load);
  std::error_code ignored;
  if (parts_->is_first_rank() &&
      std::filesystem::exists(std::filesystem::path(load->folder) / detail::kJointFile, ignored)) {
    std::fprintf(
        stderr,
        "pacer: that checkpoint was saved together with those of other Sessions; resume() goes on with "
        "this Session alone, pacer::resume_together with all of them from one moment\n");
  }
  return saved_step_;
}

// `find` is asked on rank 0 alone; an empty folder is none. Every rank has read and checked all of it before any of
// them changes what cannot be put back.
std::unique_ptr<detail::PendingLoad> Checkpoints::prepare_load(const std::function<std::string()>& find) {
  require(parts_ != nullptr,
          "Checkpoints::load_newest and load_step need the hook in a Session; call session.use first");
  Communicator& world = parts_->world();
  require(!parts_->sharded_state || !parts_->sharded_state->keeps_parts(),
          "a checkpoint is loaded before ranks keep parts of the parameters; call session.resume() before "
          "prewarm and begin");
  RankStatus status;
  status.intent = Intent::load;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  complete_save();
  const std::string folder = on_all_ranks_or_none("find a checkpoint", [&] {
                               return world.rank() == 0 ? find() : std::string();
                             }).front();
  folder_is_checked_ = folder_is_checked_ || !folder.empty();
  if (folder.empty()) return nullptr;

  detail::TrainingState state;
  std::unique_ptr<detail::PendingLoad> load;
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
  on_all_ranks_or_none("read the checkpoint",
                       in_this_folder([&] { state = detail::read_state(*parts_, folder); }));
  on_all_ranks_or_none("continue from the checkpoint", in_this_folder([&] {
                         load = std::make_unique<detail::PendingLoad>(*parts_, std::move(state), folder);
                       }));
  return load;
}

void Checkpoints::commit_load(detail::PendingLoad& load) {
  load.import.commit();
  saved_step_ = parts_->progress.step;
  saved_folder_ = load.folder;
  if (!parts_->is_first_rank()) return;
  for (const std::string& note : {load.import.random_state_note(), load.import.micro_batches_note()}) {
    if (!note.empty()) std::fprintf(stderr, "pacer: %s\n", note.c_str());
  }
  std::fprintf(stderr, "pacer: resumed from %s, after step %lld\n", load.folder.c_str(),
               static_cast<long long>(saved_step_));
}

}  // namespace pacer
