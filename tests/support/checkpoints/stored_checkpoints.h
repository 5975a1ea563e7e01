// What the tests of checkpoints do with folders and ranks: which steps are stored, checkpoints with a file
// that was changed (whole by their manifests: what another run, or another version, could have written), and
// runs of several ranks.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/collectives/ranks.h"
#include "support/session/small_run.h"

namespace pacer::testing {

// Newest first.
inline std::vector<int64_t> stored_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& each : list_checkpoints(folder)) steps.push_back(each.step);
  return steps;
}

// All names in the folder of a run, hidden ones, too, but not the lock that a run under way has there.
inline std::vector<std::string> names_in_run(const std::string& folder) {
  std::vector<std::string> names = list_folder(posix_file_system(), folder);
  names.erase(std::remove(names.begin(), names.end(), ".checkpoints.lock"), names.end());
  return names;
}

inline RegisteredOptimizer registered_optimizer(const std::string& name) {
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (optimizer.name == name) return optimizer;
  }
  throw std::invalid_argument("no registered optimizer is called " + name);
}

// One for each rank.
using SmallRuns = std::vector<std::unique_ptr<SmallRun>>;

// f(run, rank) in a thread for each rank; what they threw, as run_ranks has it.
inline std::vector<std::string> on_all_ranks(SmallRuns& runs, const std::function<void(SmallRun&, int)>& f) {
  return run_ranks(static_cast<int>(runs.size()),
                   [&](int rank) { f(*runs[static_cast<size_t>(rank)], rank); });
}

// Writes the checkpoint anew with `edit` applied to the tensors of one of its files.
inline void rewrite_file(const std::string& folder, const std::string& file,
                         const std::function<void(NamedTensors&)>& edit) {
  const Checkpoint checkpoint = open_checkpoint(folder);
  NamedTensors tensors;
  {
    FileReader reader(posix_file_system(), folder + "/" + file);
    tensors = detail::read_tensors(reader, file);
  }
  edit(tensors);
  CheckpointWriter writer(posix_file_system(), folder.substr(0, folder.rfind('/')), checkpoint.manifest.step);
  for (const auto& item : checkpoint.files) {
    writer.write(item.first, [&](ByteSink& sink) {
      if (item.first == file) {
        detail::write_tensors(sink, tensors);
      } else {
        sink.write(item.second.data(), item.second.size());
      }
    });
  }
  writer.commit({checkpoint.manifest.world_size, checkpoint.manifest.pacer_version, {}});
}

}  // namespace pacer::testing
