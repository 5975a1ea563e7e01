#include "checkpoint_binding.h"

#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include <torch/version.h>

#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/schedulers/detail/checkpoint_files.h>
#include <pacer/schedulers/detail/tensor_file.h>

#include "named_dict.h"

namespace pacer::python {
namespace {

// Keeps the newest `keep` and returns the folder.
std::string save_checkpoint(const std::string& root, int64_t step, const Tensors& model,
                            const Tensors& optimizer, const Tensors& errors, const Tensors& session,
                            int64_t keep) {
  require(step >= 0, "save_checkpoint needs a step >= 0, not ", step);
  require(keep >= 1, "save_checkpoint needs keep >= 1, not ", keep);
  CheckpointWriter writer(posix_file_system(), root, step);
  const auto write = [&](const std::string& name, const Tensors& tensors) {
    writer.write(name, [&](ByteSink& out) { detail::write_tensors(out, from_dict(tensors)); });
  };
  write(detail::kModelFile, model);
  write(detail::file_of_rank("optimizer", 0, 1), optimizer);
  if (!errors.empty()) write(detail::file_of_rank("errors", 0, 1), errors);
  write(detail::file_of_rank("session", 0, 1), session);
  const std::string folder = writer.commit({1, version(), {{"libtorch", TORCH_VERSION}}});
  for (const RemovalFailure& failure : remove_old_checkpoints(root, keep, posix_file_system(), step)) {
    std::fprintf(stderr, "pacer: %s\n", failure.reason.c_str());
  }
  return folder;
}

// The step, the model, the optimizer, its errors by rank, and the session of
// rank 0. Everything is on the CPU and was compared with its checksum.
std::tuple<int64_t, Tensors, Tensors, std::vector<Tensors>, Tensors> read_checkpoint(
    const std::string& folder) {
  const CheckpointManifest manifest = read_manifest(folder);
  const auto read = [&](const CheckpointFile& file, NamedTensors& tensors) {
    read_checkpoint_file(folder, file, [&](FileReader& reader) {
      tensors.merge(detail::read_tensors(reader, folder + "/" + file.name));
    });
  };
  NamedTensors model, optimizer, session;
  for (const CheckpointFile& file : detail::model_files(folder, manifest)) read(file, model);
  std::vector<Tensors> errors;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    const auto* of_optimizer =
        detail::find_file(manifest, detail::file_of_rank("optimizer", rank, manifest.world_size));
    if (of_optimizer != nullptr) read(*of_optimizer, optimizer);
    NamedTensors of_rank;
    const auto* own = detail::find_file(manifest, detail::file_of_rank("errors", rank, manifest.world_size));
    if (own != nullptr) read(*own, of_rank);
    errors.push_back(to_dict(of_rank));
  }
  const auto* of_session =
      detail::find_file(manifest, detail::file_of_rank("session", 0, manifest.world_size));
  if (of_session != nullptr) read(*of_session, session);
  return {manifest.step, to_dict(model), to_dict(optimizer), errors, to_dict(session)};
}

}  // namespace

void register_checkpoints(torch::Library& library) {
  library.def(
      "save_checkpoint(str root, int step, Dict(str, Tensor) model, Dict(str, Tensor) optimizer, "
      "Dict(str, Tensor) errors, Dict(str, Tensor) session, int keep) -> str",
      save_checkpoint);
  library.def("find_checkpoint(str root) -> str",
              [](const std::string& root) { return detail::find_newest(root); });
  library.def(
      "read_checkpoint(str folder) -> (int, Dict(str, Tensor), Dict(str, Tensor), Dict(str, Tensor)[], "
      "Dict(str, Tensor))",
      read_checkpoint);
}

}  // namespace pacer::python
