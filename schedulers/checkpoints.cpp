#include <pacer/schedulers/checkpoints.h>

#include <cstdio>
#include <utility>

#include <torch/version.h>

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
constexpr const char* kOptimizerFile = "optimizer-rank-00000-of-00001.safetensors";
constexpr const char* kSessionFile = "session-rank-00000-of-00001.safetensors";

// The root and all folders above it.
void make_folders(const std::string& path) {
  FileSystem& files = posix_file_system();
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    if (!folder_exists(files, path.substr(0, end))) make_folder(files, path.substr(0, end));
  }
}

NamedTensors take_file(Checkpoint& checkpoint, const std::string& folder, const char* name) {
  const auto found = checkpoint.files.find(name);
  require<FileError>(found != checkpoint.files.end(), "the checkpoint ", folder, " has no ", name,
                     "; it was not written by a single process of this version");
  return detail::read_tensors(std::move(found->second), folder + "/" + name);
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

std::string Checkpoints::save_now() {
  require(parts_ != nullptr, "Checkpoints::save_now needs the hook in a Session; call session.use first");
  require(parts_->progress.micro_step == 0,
          "Checkpoints::save_now belongs between steps, not into an accumulation window");
  const detail::TrainingState state = detail::export_state(*parts_);
  const int64_t step = parts_->progress.step;
  make_folders(options_.folder() + "/");
  CheckpointWriter writer(posix_file_system(), options_.folder(), step);
  const auto write = [&](const char* name, const NamedTensors& tensors) {
    writer.write(name, [&](ByteSink& sink) { detail::write_tensors(sink, tensors); });
  };
  write(kModelFile, state.model);
  write(kOptimizerFile, state.optimizer);
  write(kSessionFile, state.session);
  const std::string folder = writer.commit({1, version(), {{"libtorch", TORCH_VERSION}}});
  saved_step_ = step;
  remove_old_checkpoints(options_.folder(), options_.keep());
  return folder;
}

std::optional<int64_t> Checkpoints::load_newest() {
  require(parts_ != nullptr, "Checkpoints::load_newest needs the hook in a Session; call session.use first");
  const NewestCheckpoint newest = find_newest_checkpoint(options_.folder());
  for (const std::string& reason : newest.passed_over)
    std::fprintf(stderr, "pacer: passed over %s\n", reason.c_str());
  require<FileError>(
      newest.checkpoint || newest.passed_over.empty(), "none of the ", newest.passed_over.size(),
      " checkpoints in ", options_.folder(),
      " can be read (the newest: ", newest.passed_over.empty() ? "" : newest.passed_over.front(),
      "); repair one, or remove them all to start anew");
  if (!newest.checkpoint) return std::nullopt;
  const std::string& folder = newest.checkpoint->folder;
  Checkpoint checkpoint = open_checkpoint(folder);
  require(checkpoint.manifest.world_size == 1, "the checkpoint ", folder, " was saved by ",
          checkpoint.manifest.world_size, " processes, but this run has one");
  detail::TrainingState state;
  state.model = take_file(checkpoint, folder, kModelFile);
  state.optimizer = take_file(checkpoint, folder, kOptimizerFile);
  state.session = take_file(checkpoint, folder, kSessionFile);
  try {
    detail::import_state(*parts_, state);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(detail::concatenate("cannot resume from ", folder, ": ", error.what()));
  }
  saved_step_ = parts_->progress.step;
  std::fprintf(stderr, "pacer: resumed from %s, after step %lld\n", folder.c_str(),
               static_cast<long long>(saved_step_));
  return saved_step_;
}

}  // namespace pacer
