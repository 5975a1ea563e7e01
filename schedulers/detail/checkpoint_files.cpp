#include <pacer/schedulers/detail/checkpoint_files.h>

#include <cstdio>
#include <utility>
#include <vector>

#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/schedulers/detail/tensor_file.h>

namespace pacer::detail {
namespace {

std::string file_of_rank(const char* kind, int rank, int world_size) {
  char name[80];
  std::snprintf(name, sizeof name, "%s-rank-%05d-of-%05d.safetensors", kind, rank, world_size);
  return name;
}

// The tensors of a file that the checkpoint must have.
NamedTensors read_file(const std::string& folder, const CheckpointManifest& manifest,
                       const std::string& name) {
  const CheckpointFile* file = find_file(manifest, name);
  require<FileError>(file != nullptr, "the checkpoint ", folder, " has no ", name,
                     "; it was not written by this version");
  NamedTensors tensors;
  read_checkpoint_file(folder, *file,
                       [&](FileReader& reader) { tensors = read_tensors(reader, folder + "/" + name); });
  return tensors;
}

}  // namespace

const CheckpointFile* find_file(const CheckpointManifest& manifest, const std::string& name) {
  for (const CheckpointFile& file : manifest.files) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

RankFiles files_of_rank(TrainingState state, const Communicator& world) {
  const int rank = world.rank(), ranks = world.world_size();
  RankFiles files;
  if (rank == 0) {
    files.emplace_back(kModelFile, std::move(state.model));
    files.emplace_back(file_of_rank("optimizer", 0, ranks), std::move(state.optimizer));
  }
  if (!state.rank_optimizer.empty()) {
    files.emplace_back(file_of_rank("errors", rank, ranks), std::move(state.rank_optimizer));
  }
  files.emplace_back(file_of_rank("session", rank, ranks), std::move(state.session));
  return files;
}

std::string find_newest(const std::string& root) {
  const NewestCheckpoint newest = find_newest_checkpoint(root);
  for (const std::string& reason : newest.passed_over) std::fprintf(stderr, "pacer: %s\n", reason.c_str());
  require<FileError>(newest.checkpoint || newest.passed_over.empty(), "none of the ",
                     newest.passed_over.size(), " checkpoints in ", root, " can be read (the newest: ",
                     newest.passed_over.empty() ? "" : newest.passed_over.front(),
                     "); repair one, or remove them all to start anew");
  return newest.checkpoint ? newest.checkpoint->folder : "";
}

TrainingState read_state(const SessionParts& parts, const std::string& folder) {
  const Communicator& world = parts.world();
  const CheckpointManifest manifest = read_manifest(folder);
  const auto ranks = static_cast<int>(manifest.world_size);
  const bool same = ranks == world.world_size(), had_this_rank = world.rank() < ranks;
  TrainingState state;
  state.model = read_file(folder, manifest, kModelFile);
  state.optimizer = read_file(folder, manifest, file_of_rank("optimizer", 0, ranks));
  state.session =
      read_file(folder, manifest, file_of_rank("session", had_this_rank ? world.rank() : 0, ranks));
  std::vector<NamedTensors> errors;
  for (int rank = 0; rank < ranks; ++rank) {
    if (same && rank != world.rank()) continue;
    const std::string name = file_of_rank("errors", rank, ranks);
    errors.emplace_back();
    if (find_file(manifest, name) != nullptr) errors.back() = read_file(folder, manifest, name);
  }
  if (same) {
    state.rank_optimizer = std::move(errors.front());
    return state;
  }
  state.session = session_of_other_ranks(parts, std::move(state.session), had_this_rank);
  if (parts.session_optimizer()) {
    state.rank_optimizer = parts.session_optimizer()->join_rank_states(errors);
  }
  return state;
}

}  // namespace pacer::detail
