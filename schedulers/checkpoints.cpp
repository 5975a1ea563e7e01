#include <pacer/schedulers/checkpoints.h>

#include <cstdio>
#include <memory>
#include <sstream>
#include <utility>

#include <torch/version.h>

#include <pacer/collectives/agreement.h>
#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/schedulers/detail/foreign_state.h>
#include <pacer/schedulers/detail/tensor_file.h>
#include <pacer/schedulers/detail/training_state.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/step_report.h>

namespace pacer {
namespace {

constexpr const char* kModelFile = "model.safetensors";

std::string file_of_rank(const char* kind, int rank, int world_size) {
  char name[80];
  std::snprintf(name, sizeof name, "%s-rank-%05d-of-%05d.safetensors", kind, rank, world_size);
  return name;
}

// The root and all folders above it.
void make_folders(const std::string& path) {
  FileSystem& files = posix_file_system();
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    if (!folder_exists(files, path.substr(0, end))) make_folder(files, path.substr(0, end));
  }
}

NamedTensors take_file(Checkpoint& checkpoint, const std::string& folder, const std::string& name) {
  const auto found = checkpoint.files.find(name);
  require<FileError>(found != checkpoint.files.end(), "the checkpoint ", folder, " has no ", name,
                     "; it was not written by this version");
  return detail::read_tensors(std::move(found->second), folder + "/" + name);
}

// One line of text per file, for rank 0.
std::string line_of(const CheckpointFile& file) {
  return detail::concatenate(file.name, " ", file.size, " ", file.checksum, "\n");
}
std::vector<CheckpointFile> files_of(const std::string& lines) {
  std::vector<CheckpointFile> files;
  std::istringstream text(lines);
  for (CheckpointFile file; text >> file.name >> file.size >> file.checksum;) files.push_back(file);
  return files;
}

}  // namespace

Checkpoints::Checkpoints(CheckpointsOptions options) : options_(std::move(options)) {
  std::string& folder = options_.folder();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  require(!folder.empty(), "Checkpoints needs the name of a folder");
  require(options_.every() >= 1, "Checkpoints: every must be at least 1 step, not ", options_.every());
  require(options_.keep() >= 1, "Checkpoints: keep must be at least 1, not ", options_.keep());
}

void Checkpoints::attach(SessionParts& parts) {
  require(
      parts.session_optimizer() != nullptr || detail::can_export(parts.optimizer()),
      "Checkpoints cannot save the state of this optimizer by parameter name; use one of pacer's, or torch's "
      "Adam, AdamW, SGD, RMSprop or Adagrad");
  parts_ = &parts;
}

void Checkpoints::after_step(StepReport& report) {
  if (report.progress().step % options_.every() == 0) save_now();
}

void Checkpoints::finish(const Progress& progress) {
  if (progress.step > 0 && progress.step != saved_step_) save_now();
}

// Does f on every rank and returns what it returned on each. Where it throws on one, all ranks throw.
std::vector<std::string> Checkpoints::together(const char* action,
                                               const std::function<std::string()>& f) const {
  Communicator& world = parts_->world();
  if (world.world_size() == 1) return {f()};
  std::string own;
  try {
    own = "+" + f();
  } catch (const std::exception& error) {
    own = detail::concatenate("-", error.what());
  }
  std::vector<std::string> all = world.exchange(own, CollectiveOptions().timeout(options_.timeout()));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    require<FileError>(all[rank].front() == '+', "rank ", rank, " could not ", action, ": ",
                       all[rank].substr(1));
    all[rank].erase(0, 1);
  }
  return all;
}

std::string Checkpoints::save_now() {
  require(parts_ != nullptr, "Checkpoints::save_now needs the hook in a Session; call session.use first");
  require(parts_->progress.micro_step == 0,
          "Checkpoints::save_now belongs between steps, not into an accumulation window");
  Communicator& world = parts_->world();
  const int64_t step = parts_->progress.step;
  RankStatus status;
  status.intent = Intent::save;
  status.step = step;
  if (world.world_size() > 1) StatusExchange(world, status).wait();

  std::unique_ptr<CheckpointWriter> writer;
  const std::string staging =
      together("begin a checkpoint", [&]() -> std::string {
        if (world.rank() != 0) return "";
        make_folders(options_.folder() + "/");
        writer = std::make_unique<CheckpointWriter>(posix_file_system(), options_.folder(), step);
        return writer->staging();
      }).front();
  const std::vector<std::string> written = together("write its part of a checkpoint", [&] {
    const detail::TrainingState state = detail::export_state(*parts_);
    std::string lines;
    const auto write = [&](const std::string& name, const NamedTensors& tensors) {
      lines += line_of(write_checkpoint_file(staging, name,
                                             [&](ByteSink& sink) { detail::write_tensors(sink, tensors); }));
    };
    if (world.rank() == 0) {
      write(kModelFile, state.model);
      write(file_of_rank("optimizer", 0, world.world_size()), state.optimizer);
    }
    if (!state.rank_optimizer.empty()) {
      write(file_of_rank("errors", world.rank(), world.world_size()), state.rank_optimizer);
    }
    write(file_of_rank("session", world.rank(), world.world_size()), state.session);
    world.check();  // what was written is what training computed, not the remains of a broken exchange
    return lines;
  });
  const std::string folder =
      together("complete a checkpoint", [&]() -> std::string {
        if (world.rank() != 0) return "";
        for (const std::string& lines : written) {
          for (const CheckpointFile& file : files_of(lines)) writer->adopt(file);
        }
        return writer->commit({world.world_size(), version(), {{"libtorch", TORCH_VERSION}}});
      }).front();
  saved_step_ = step;
  if (world.rank() == 0) remove_old_checkpoints(options_.folder(), options_.keep());
  return folder;
}

// The folder of the newest checkpoint that verifies; empty where there is none.
std::string Checkpoints::find_newest() const {
  const NewestCheckpoint newest = find_newest_checkpoint(options_.folder());
  for (const std::string& reason : newest.passed_over)
    std::fprintf(stderr, "pacer: passed over %s\n", reason.c_str());
  require<FileError>(
      newest.checkpoint || newest.passed_over.empty(), "none of the ", newest.passed_over.size(),
      " checkpoints in ", options_.folder(),
      " can be read (the newest: ", newest.passed_over.empty() ? "" : newest.passed_over.front(),
      "); repair one, or remove them all to start anew");
  return newest.checkpoint ? newest.checkpoint->folder : "";
}

// What this rank goes on from; with another number of ranks than those that saved it, its part of what they
// had.
detail::TrainingState Checkpoints::read_state(const std::string& folder) const {
  const Communicator& world = parts_->world();
  const auto ranks = static_cast<int>(open_checkpoint(folder, {}).manifest.world_size);
  const bool same = ranks == world.world_size(), had_this_rank = world.rank() < ranks;
  const std::string optimizer_file = file_of_rank("optimizer", 0, ranks);
  const std::string session_file = file_of_rank("session", had_this_rank ? world.rank() : 0, ranks);
  std::vector<std::string> error_files;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!same || rank == world.rank()) error_files.push_back(file_of_rank("errors", rank, ranks));
  }
  std::vector<std::string> names = {kModelFile, optimizer_file, session_file};
  names.insert(names.end(), error_files.begin(), error_files.end());
  Checkpoint checkpoint = open_checkpoint(folder, names);
  detail::TrainingState state;
  state.model = take_file(checkpoint, folder, kModelFile);
  state.optimizer = take_file(checkpoint, folder, optimizer_file);
  state.session = take_file(checkpoint, folder, session_file);
  std::vector<NamedTensors> errors;
  for (const std::string& name : error_files) {
    errors.emplace_back();
    if (checkpoint.files.count(name) != 0) errors.back() = take_file(checkpoint, folder, name);
  }
  if (same) {
    state.rank_optimizer = std::move(errors.front());
    return state;
  }
  state.session = detail::session_of_other_ranks(*parts_, std::move(state.session), had_this_rank);
  if (parts_->session_optimizer()) {
    state.rank_optimizer = parts_->session_optimizer()->join_rank_states(errors);
  }
  return state;
}

std::optional<int64_t> Checkpoints::load_newest() {
  require(parts_ != nullptr, "Checkpoints::load_newest needs the hook in a Session; call session.use first");
  Communicator& world = parts_->world();
  RankStatus status;
  status.intent = Intent::load;
  if (world.world_size() > 1) StatusExchange(world, status).wait();
  const std::string folder = together("find a checkpoint", [&] {
                               return world.rank() == 0 ? find_newest() : std::string();
                             }).front();
  if (folder.empty()) return std::nullopt;

  detail::TrainingState state;
  together("read the checkpoint", [&] {
    state = read_state(folder);
    return std::string();
  });
  together("continue from the checkpoint", [&] {
    try {
      detail::import_state(*parts_, state);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(detail::concatenate("cannot resume from ", folder, ": ", error.what()));
    }
    return std::string();
  });
  saved_step_ = parts_->progress.step;
  if (world.rank() == 0) {
    std::fprintf(stderr, "pacer: resumed from %s, after step %lld\n", folder.c_str(),
                 static_cast<long long>(saved_step_));
  }
  return saved_step_;
}

}  // namespace pacer
