#include "checkpoint_binding.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/version.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/checkpoint_save.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/collectives/agreement.h>
#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/file_system.h>
#include <pacer/files/folder_lock.h>

#include "communicator_binding.h"
#include "named_dict.h"

namespace pacer::python {
namespace {

// None: a single rank.
using Ranks = std::optional<c10::intrusive_ptr<PythonCommunicator>>;

std::shared_ptr<Communicator> world_of(const Ranks& ranks) {
  return ranks ? (*ranks)->world() : Communicator::alone(at::kCPU);
}

// What this rank did, an answer or a failure, and the answers of all ranks; throws on all where one failed.
std::vector<std::string> agree(const Ranks& ranks, const std::string& action, const std::string& answer,
                               const std::string& failure) {
  return detail::on_all_ranks_or_none(*world_of(ranks), CheckpointsOptions("").timeout(), action.c_str(),
                                      [&] {
                                        require(failure.empty(), failure);
                                        return answer;
                                      });
}

// All ranks call it; each writes its part, as with a Session. `parameters` are the names of those tensors of
// the model that are to be finite. Keeps the newest `keep`, and returns the folder and, on rank 0, whether
// the parameters of all ranks are finite; true elsewhere.
std::tuple<std::string, bool> save_checkpoint(const std::string& root, int64_t step, const Tensors& model,
                                              const std::vector<std::string>& parameters,
                                              const Tensors& optimizer, const Tensors& errors,
                                              const Tensors& session, int64_t keep, const Ranks& ranks) {
  const std::shared_ptr<Communicator> world = world_of(ranks);
  const int count = world->world_size();
  RankStatus status;
  status.intent = Intent::save;
  status.step = step;
  if (count > 1) StatusExchange(*world, status).wait();
  require(!root.empty(), "save_checkpoint needs the name of a folder");
  require(step >= 0, "save_checkpoint needs a step >= 0, not ", step);
  require(keep >= 1, "save_checkpoint needs keep >= 1, not ", keep);
  detail::SaveJob job;
  job.step = step;
  job.rank = world->rank();
  job.facts = {count, version(), {{"libtorch", TORCH_VERSION}}};
  job.timeout = CheckpointsOptions(root).timeout();
  job.root = root;
  job.keep = keep;
  job.must_be_finite = [names = std::unordered_set<std::string>(parameters.begin(), parameters.end())](
                           const std::string& name) { return names.count(name) != 0; };
  std::unique_ptr<FolderLock> lock;  // of rank 0, until the old checkpoints are removed
  const auto on_all_ranks_or_none = [&, timeout = job.timeout](const char* action, const auto& f) {
    return detail::on_all_ranks_or_none(*world, timeout, action, f);
  };
  job.staging = on_all_ranks_or_none("begin a checkpoint", [&]() -> std::string {
                  if (world->rank() != 0) return "";
                  make_folders(posix_file_system(), root);
                  lock = std::make_unique<FolderLock>(root, "checkpoints");
                  job.writer = std::make_unique<CheckpointWriter>(posix_file_system(), root, step);
                  return job.writer->staging();
                }).front();
  detail::TrainingState state{from_dict(model), from_dict(optimizer), from_dict(errors), from_dict(session)};
  const std::vector<std::string> fingerprints = on_all_ranks_or_none(
      "write its part of a checkpoint", [&] { return detail::fingerprint_of(state.optimizer); });
  for (size_t rank = 1; rank < fingerprints.size(); ++rank) {
    require(fingerprints[rank] == fingerprints[0], "the optimizer of rank ", rank,
            " has state of other names, dtypes or shapes than that of rank 0, so that no checkpoint can hold "
            "both; give all ranks the same model and the same steps");
  }
  const detail::WriterOfTensor writers = detail::writers_of(state, count, /*deals_model_out=*/false);
  detail::CheckpointSave save(std::move(job));
  save.write_here(detail::tensors_of_rank(std::move(state), writers, *world), [&] { world->check(); });
  try {
    on_all_ranks_or_none("write its part of a checkpoint", [&] {
      save.wait_until_written();
      return std::string();
    });
  } catch (...) {
    save.give_up();
    throw;
  }
  const std::string folder =
      on_all_ranks_or_none("complete a checkpoint", [&] { return save.wait(); }).front();
  for (const RemovalFailure& failure : save.not_removed()) {
    std::fprintf(stderr, "pacer: %s\n", failure.reason.c_str());
  }
  return {folder, world->rank() != 0 || save.is_finite()};
}

// The path itself where that is a checkpoint, else the newest one under it that verifies; empty for none.
std::string find_checkpoint(const std::string& path) {
  const std::string manifest = path + '/' + kManifestName;
  if (std::FILE* file = std::fopen(manifest.c_str(), "r")) {
    std::fclose(file);
    return path;
  }
  return detail::find_newest(path);
}

NamedTensors errors_of(const std::string& folder, const CheckpointManifest& manifest, int rank) {
  NamedTensors errors;
  const auto* file =
      detail::find_file(manifest, detail::file_of_rank("errors", rank, detail::ranks_of(manifest, folder)));
  if (file == nullptr) return errors;
  read_checkpoint_file(folder, *file, [&](FileReader& reader) {
    errors = detail::read_tensors(reader, folder + "/" + file->name);
  });
  return errors;
}

// Of each rank that saved.
std::vector<Tensors> read_errors(const std::string& folder) {
  const CheckpointManifest manifest = read_manifest(folder);
  std::vector<Tensors> errors;
  for (int rank = 0; rank < detail::ranks_of(manifest, folder); ++rank) {
    errors.push_back(to_dict(errors_of(folder, manifest, rank)));
  }
  return errors;
}

// For one of `world_size` ranks: the step, the model, the optimizer, this rank's errors (None where another
// number of ranks saved), and its session: rank 0's without random states where there was no such rank.
// Everything is on the CPU and was compared with its checksum.
std::tuple<int64_t, Tensors, Tensors, std::optional<Tensors>, Tensors> read_checkpoint(
    const std::string& folder, int64_t rank, int64_t world_size) {
  const CheckpointManifest manifest = read_manifest(folder);
  const int ranks = detail::ranks_of(manifest, folder);
  const auto read = [&](const CheckpointFile& file, NamedTensors& tensors) {
    read_checkpoint_file(folder, file, [&](FileReader& reader) {
      tensors.merge(detail::read_tensors(reader, folder + "/" + file.name));
    });
  };
  const auto read_if_there = [&](const char* kind, int of_rank, NamedTensors& tensors) {
    const auto* file = detail::find_file(manifest, detail::file_of_rank(kind, of_rank, ranks));
    if (file != nullptr) read(*file, tensors);
  };
  NamedTensors model, optimizer, session;
  for (const CheckpointFile& file : detail::model_files(folder, manifest)) read(file, model);
  for (int of_rank = 0; of_rank < ranks; ++of_rank) read_if_there("optimizer", of_rank, optimizer);
  const bool had_this_rank = rank < ranks;
  read_if_there("session", had_this_rank ? static_cast<int>(rank) : 0, session);
  if (!had_this_rank) {
    for (const char* random : {"random/cpu", "random/cuda"}) session.erase(random);
  }
  std::optional<Tensors> errors;
  if (ranks == world_size) errors = to_dict(errors_of(folder, manifest, static_cast<int>(rank)));
  return {manifest.step, to_dict(model), to_dict(optimizer), errors, to_dict(session)};
}

}  // namespace

void register_checkpoints(torch::Library& library) {
  library.def("agree", agree);
  library.def("save_checkpoint", save_checkpoint);
  library.def("find_checkpoint(str path) -> str", find_checkpoint);
  library.def("read_errors(str folder) -> Dict(str, Tensor)[]", read_errors);
  library.def(
      "read_checkpoint(str folder, int rank, int world_size) -> (int, Dict(str, Tensor), Dict(str, Tensor), "
      "Dict(str, Tensor)?, Dict(str, Tensor))",
      read_checkpoint);
}

}  // namespace pacer::python
