#include <pacer/checkpoints/detail/checkpoint_files.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/deferred_storage.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/checksum.h>
#include <pacer/files/json_writer.h>
#include <pacer/hooks/detail/torch_optimizer_state.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer::detail {

std::string file_of_rank(const char* kind, int rank, int world_size) {
  char name[80];
  std::snprintf(name, sizeof name, "%s-rank-%05d-of-%05d.safetensors", kind, rank, world_size);
  return name;
}

namespace {

// Counted from 1, as Python's readers know it.
std::string model_file_of_rank(int rank, int world_size) {
  char name[80];
  std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", rank + 1, world_size);
  return name;
}

// The tensors of a file that the checkpoint must have.
NamedTensors read_file(const std::string& folder, const CheckpointManifest& manifest, const std::string& name,
                       const TensorPlace& place_of = nullptr, const TensorPieces& pieces = nullptr) {
  const CheckpointFile* file = find_file(manifest, name);
  require<FileError>(file != nullptr, "the checkpoint ", folder, " has no ", name,
                     "; it was not written by this version");
  NamedTensors tensors;
  read_checkpoint_file(folder, *file, [&](FileReader& reader) {
    tensors = read_tensors(reader, folder + "/" + name, place_of, Unwanted::read, pieces);
  });
  return tensors;
}

// The optimizer's state from however many files it lies in: each rank wrote a share, and before that was so
// rank 0 all of it.
NamedTensors read_optimizer(const std::string& folder, const CheckpointManifest& manifest,
                            const TensorPlace& place_of, const TensorPieces& pieces) {
  const int ranks = ranks_of(manifest, folder);
  NamedTensors tensors = read_file(folder, manifest, file_of_rank("optimizer", 0, ranks), place_of, pieces);
  for (int rank = 1; rank < ranks; ++rank) {
    const std::string name = file_of_rank("optimizer", rank, ranks);
    if (find_file(manifest, name) == nullptr) continue;
    tensors.merge(read_file(folder, manifest, name, place_of, pieces));
  }
  return tensors;
}

using TensorSet = std::unordered_set<const void*>;  // by TensorImpl

// Optimizers call their state by the parameter's name, which may have any character in it, '/', and what it
// is; torch's also say of each tensor whether it exists.
std::string parameter_of(std::string name) {
  const size_t length = sizeof kExists - 1;
  if (name.size() > length && name.compare(name.size() - length, length, kExists) == 0) {
    name.resize(name.size() - length);
  }
  const size_t slash = name.rfind('/');
  return slash == std::string::npos ? "" : name.substr(0, slash);
}

// Leaves out what belongs to these tensors of the model.
TensorPlace leaving_out(TensorSet others, const NamedTensors& model, TensorPlace place_of, bool is_state) {
  if (others.empty()) return place_of;
  return [others = std::move(others), &model, place_of = std::move(place_of), is_state](
             const std::string& name, at::IntArrayRef sizes) {
    const auto tensor = model.find(is_state ? parameter_of(name) : name);
    const bool is_left_out = tensor != model.end() && others.count(tensor->second.unsafeGetTensorImpl()) != 0;
    if (is_left_out) return std::optional<at::Device>();
    return place_of ? place_of(name, sizes) : std::optional(at::Device(at::kCPU));
  };
}

// A tensor that belongs to a parameter and has its shape goes where the parameter is, all others to the CPU.
TensorPlace beside_parameters(NamedTensors model) {
  return [model = std::move(model)](const std::string& name, at::IntArrayRef sizes) {
    const auto parameter = model.find(parameter_of(name));
    const bool is_beside = parameter != model.end() && !sizes.empty() && parameter->second.sizes() == sizes;
    return std::optional(is_beside ? parameter->second.device() : at::Device(at::kCPU));
  };
}

// Of parameters without memory, and of the optimizer's state for them, a rank that will keep a part needs no more.
TensorPieces pieces_of_rank(const SessionParts& parts, const NamedTensors& model, bool is_state) {
  const SessionOptimizer* optimizer = parts.session_optimizer();
  const bool has_parts = parts.gradients_are_shared_out && parts.sharded_state != nullptr &&
                         optimizer != nullptr && optimizer->unshared_reason(GradientScope::world).empty();
  if (!has_parts) return nullptr;
  return [&model, is_state, kept = parts.sharded_state->kept_parts()](
             const std::string& name, at::IntArrayRef sizes) -> std::optional<TensorPiece> {
    const auto own = model.find(is_state ? parameter_of(name) : name);
    const bool is_alike = own != model.end() && is_deferred(own->second) && own->second.sizes() == sizes;
    const bool is_of_hook = is_state && name.find('/' + std::string(kFieldOfHook)) != std::string::npos;
    if (!is_alike || is_of_hook) return std::nullopt;
    const auto part = kept.find(own->second.unsafeGetTensorImpl());
    if (part == kept.end()) return std::nullopt;
    return TensorPiece{part->second.first, part->second.count};
  };
}

}  // namespace

const CheckpointFile* find_file(const CheckpointManifest& manifest, const std::string& name) {
  for (const CheckpointFile& file : manifest.files) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

int ranks_of(const CheckpointManifest& manifest, const std::string& folder) {
  const auto files = static_cast<int64_t>(manifest.files.size());
  require<FileError>(manifest.world_size <= files, "the checkpoint ", folder, " has the world_size ",
                     manifest.world_size, " in its manifest, but only ", files,
                     " files, of which each rank writes one or more; it was not written by pacer");
  return static_cast<int>(manifest.world_size);
}

WriterOfTensor writers_of(const TrainingState& state, int ranks, bool deals_model_out) {
  WriterOfTensor writers;
  writers.model_is_dealt_out = deals_model_out && ranks > 1;
  std::vector<size_t> bytes(static_cast<size_t>(ranks));
  const auto deal_out = [&](const NamedTensors& tensors, std::map<std::string, int>& writer_of) {
    std::vector<const NamedTensors::value_type*> largest_first;
    for (const auto& item : tensors) largest_first.push_back(&item);
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [](const auto* a, const auto* b) { return a->second.nbytes() > b->second.nbytes(); });
    for (const auto* item : largest_first) {
      const auto least = std::min_element(bytes.begin(), bytes.end());
      *least += item->second.nbytes();
      writer_of[item->first] = static_cast<int>(least - bytes.begin());
    }
  };
  if (writers.model_is_dealt_out) {
    deal_out(state.model, writers.model);
  } else {
    for (const auto& item : state.model) {
      bytes.front() += item.second.nbytes();
      writers.model[item.first] = 0;
    }
  }
  deal_out(state.optimizer, writers.optimizer);
  return writers;
}

TensorsByFile tensors_of_rank(TrainingState state, const WriterOfTensor& writers, const Communicator& world) {
  const int rank = world.rank(), ranks = world.world_size();
  const auto own = [rank](NamedTensors tensors, const std::map<std::string, int>& writer_of) {
    for (auto item = tensors.begin(); item != tensors.end();) {
      item = writer_of.at(item->first) == rank ? std::next(item) : tensors.erase(item);
    }
    return tensors;
  };
  TensorsByFile files;
  if (writers.model_is_dealt_out || rank == 0) {
    files.emplace_back(writers.model_is_dealt_out ? model_file_of_rank(rank, ranks) : kModelFile,
                       own(std::move(state.model), writers.model));
  }
  files.emplace_back(file_of_rank("optimizer", rank, ranks),
                     own(std::move(state.optimizer), writers.optimizer));
  if (!state.rank_optimizer.empty()) {
    files.emplace_back(file_of_rank("errors", rank, ranks), std::move(state.rank_optimizer));
  }
  files.emplace_back(file_of_rank("session", rank, ranks), std::move(state.session));
  return files;
}

std::vector<std::pair<std::string, std::string>> texts_of_rank(const NamedTensors& model,
                                                               const WriterOfTensor& writers,
                                                               const Communicator& world) {
  if (!writers.model_is_dealt_out || world.rank() != 0) return {};
  size_t bytes = 0;
  for (const auto& [name, tensor] : model) bytes += tensor.nbytes();
  JsonWriter json;
  json.object(JsonLayout::lines).key("metadata").object(JsonLayout::spaced).add("total_size", bytes).end();
  json.key("weight_map").object(JsonLayout::lines);
  for (const auto& item : model) {
    json.add(item.first, model_file_of_rank(writers.model.at(item.first), world.world_size()));
  }
  return {{kModelIndex, json.end().end().text() + '\n'}};
}

std::vector<CheckpointFile> model_files(const std::string& folder, const CheckpointManifest& manifest) {
  const int ranks = ranks_of(manifest, folder);
  if (const CheckpointFile* file = find_file(manifest, kModelFile)) return {*file};
  std::vector<CheckpointFile> files;
  for (int rank = 0; rank < ranks; ++rank) {
    const CheckpointFile* file = find_file(manifest, model_file_of_rank(rank, ranks));
    require<FileError>(file != nullptr, "the checkpoint ", folder, " has no ",
                       rank == 0 ? kModelFile : model_file_of_rank(rank, ranks));
    files.push_back(*file);
  }
  return files;
}

std::string fingerprint_of(const NamedTensors& tensors) {
  Checksum fingerprint;
  for (const auto& [name, tensor] : tensors) {
    const std::string line = concatenate(name, ' ', tensor.scalar_type(), ' ', tensor.sizes(), '\n');
    fingerprint.add(line.data(), line.size());
  }
  return fingerprint.hex();
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

std::string find_step(const std::string& root, int64_t step) {
  std::string steps;
  for (const CheckpointInfo& each : list_checkpoints(root)) {
    if (each.step == step) {
      verify_checkpoint(each);
      return each.folder;
    }
    steps = concatenate(each.step, steps.empty() ? "" : ", ", steps);
  }
  throw InvalidArgument(concatenate("there is no checkpoint of step ", step, " in ", root,
                                    steps.empty() ? ", nor any other" : ", but of these steps: ", steps));
}

std::vector<std::pair<CheckpointInfo, CheckpointManifest>> verified_checkpoints(const std::string& root,
                                                                                size_t at_most) {
  std::vector<std::pair<CheckpointInfo, CheckpointManifest>> finite, others;
  for (const CheckpointInfo& each : list_checkpoints(root)) {
    if (finite.size() == at_most) break;
    try {
      CheckpointManifest manifest = verify_checkpoint(each);
      (manifest.is_finite ? finite : others).emplace_back(each, std::move(manifest));
    } catch (const FileError& error) {
      std::fprintf(stderr, "pacer: %s\n", passed_over(each, error).c_str());
    }
  }
  return finite.empty() ? others : finite;
}

std::string list_steps(const std::string& root) {
  std::string steps;
  for (const auto& item : verified_checkpoints(root)) steps += concatenate(item.first.step, ' ');
  return steps;
}

TrainingState read_state(const SessionParts& parts, const std::string& folder) {
  const Communicator& world = parts.world();
  const CheckpointManifest manifest = read_manifest(folder);
  const int ranks = ranks_of(manifest, folder);
  const bool same = ranks == world.world_size(), had_this_rank = world.rank() < ranks;
  TrainingState state;
  const NamedTensors model = model_tensors(parts.model());
  const auto beside_own = [&](const std::string& name, at::IntArrayRef) {
    const auto own = model.find(name);
    // A parameter without memory takes its values over block by block.
    const bool on_host = own == model.end() || is_deferred(own->second);
    return std::optional(on_host ? at::Device(at::kCPU) : own->second.device());
  };
  for (const CheckpointFile& file : model_files(folder, manifest)) {
    state.model.merge(
        read_file(folder, manifest, file.name,
                  leaving_out(parts.tensors_on_other_ranks, model, beside_own, /*is_state=*/false),
                  pieces_of_rank(parts, model, /*is_state=*/false)));
  }
  // What will be cut on its way into the optimizer stays in host memory until then; paged state stays there.
  const SessionOptimizer* optimizer = parts.session_optimizer();
  const bool on_host = parts.gradients_are_shared_out || (optimizer && optimizer->keeps_state_on_host());
  const TensorPlace place_of = leaving_out(parts.updated_on_other_ranks, model,
                                           on_host ? nullptr : beside_parameters(model), /*is_state=*/true);
  state.optimizer =
      read_optimizer(folder, manifest, place_of, pieces_of_rank(parts, model, /*is_state=*/true));
  state.session =
      read_file(folder, manifest, file_of_rank("session", had_this_rank ? world.rank() : 0, ranks));
  state.session = session_of_other_run(parts, std::move(state.session), same, had_this_rank);
  const auto errors_of = [&](int rank, const TensorPlace& place) {
    const std::string name = file_of_rank("errors", rank, ranks);
    return find_file(manifest, name) == nullptr ? NamedTensors() : read_file(folder, manifest, name, place);
  };
  if (same) state.rank_optimizer = errors_of(world.rank(), place_of);
  if (optimizer == nullptr) return state;
  if (same && optimizer->fits_rank_state(state.optimizer, state.rank_optimizer)) return state;
  std::vector<NamedTensors> errors;
  for (int rank = 0; rank < ranks; ++rank) errors.push_back(errors_of(rank, nullptr));
  state.rank_optimizer = optimizer->join_rank_states(state.optimizer, errors);
  return state;
}

}  // namespace pacer::detail
