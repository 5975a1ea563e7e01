// How Checkpoints loads the newest checkpoint, on all ranks or on none.
#include <cstdio>
#include <utility>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/agreement.h>
#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer {

std::optional<int64_t> Checkpoints::load_newest() {
  require(parts_ != nullptr, "Checkpoints::load_newest needs the hook in a Session; call session.use first");
  Communicator& world = parts_->world();
  require(!parts_->sharded_state || !parts_->sharded_state->keeps_parts(),
          "a checkpoint is loaded before ranks keep parts of the parameters; call session.resume() before "
          "prewarm and begin");
  RankStatus status;
  status.intent = Intent::load;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  complete_save();
  const std::string folder =
      on_all_ranks_or_none("find a checkpoint", [&] {
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
  on_all_ranks_or_none("read the checkpoint",
                       in_this_folder([&] { state = detail::read_state(*parts_, folder); }));
  on_all_ranks_or_none("continue from the checkpoint",
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
