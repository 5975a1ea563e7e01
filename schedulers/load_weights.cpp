#include <pacer/schedulers/load_weights.h>

#include <algorithm>
#include <cerrno>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/safetensors.h>
#include <pacer/optimizers/named_tensors.h>
#include <pacer/schedulers/detail/checkpoint_files.h>
#include <pacer/schedulers/detail/tensor_file.h>
#include <pacer/schedulers/detail/training_state.h>

namespace pacer {
namespace {

// Where the weights are: a file, or those of a checkpoint with what its manifest says of them.
struct WeightsFiles {
  std::string folder;  // empty: no checkpoint
  std::vector<CheckpointFile> entries;
  std::vector<std::string> paths;
};

bool is_folder(const std::string& path) {
  FileSystem& files = posix_file_system();
  const int folder = files.open_folder(path);
  if (folder >= 0) files.close(folder);
  return folder >= 0;
}

bool has_manifest(const std::string& folder) {
  const std::vector<std::string> names = list_folder(posix_file_system(), folder + "/.");
  return std::find(names.begin(), names.end(), kManifestName) != names.end();
}

WeightsFiles find_weights(const std::string& path) {
  if (!is_folder(path)) return {"", {}, {path}};
  const std::string folder = has_manifest(path) ? path : detail::find_newest(path);
  require<FileError>(!folder.empty(), "cannot load weights from ", path,
                     ": it is no checkpoint and has none in it; give a safetensors file, the folder of a "
                     "checkpoint or a folder of checkpoints");
  WeightsFiles files{folder, detail::model_files(folder, read_manifest(folder)), {}};
  for (const CheckpointFile& entry : files.entries) files.paths.push_back(folder + "/" + entry.name);
  return files;
}

// Names and facts of the tensors in the files; no values.
std::vector<SafetensorsFile> read_headers(const WeightsFiles& files) {
  std::vector<SafetensorsFile> headers;
  for (const std::string& path : files.paths) {
    FileReader reader(posix_file_system(), path);
    headers.push_back(SafetensorsFile::read_header(reader, path));
  }
  return headers;
}

NamedTensors read_values(const WeightsFiles& files, const detail::TensorPlace& place_of) {
  NamedTensors values;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const auto read = [&](FileReader& reader) {
      values.merge(detail::read_tensors(reader, files.paths[i], place_of));
    };
    if (!files.folder.empty()) {
      read_checkpoint_file(files.folder, files.entries[i], read);
    } else {
      FileReader reader(posix_file_system(), files.paths[i]);
      read(reader);
      reader.finish();
    }
  }
  return values;
}

// "a", "b", "c" and 4 more
std::string first_few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", \"" : "\"") + names[i] + '"';
  if (names.size() > kShown) text += detail::concatenate(" and ", names.size() - kShown, " more");
  return text;
}

// What keeps the tensor of the file from the model's; empty where it fits.
std::string misfit(const std::string& name, const at::Tensor& own, at::ScalarType dtype,
                   at::IntArrayRef sizes) {
  const bool converts = at::isFloatingType(own.scalar_type()) && at::isFloatingType(dtype);
  if (own.sizes() == sizes && (converts || own.scalar_type() == dtype)) return "";
  return detail::concatenate("\"", name, "\" is ", dtype, " of shape ", sizes, " there, but ",
                             own.scalar_type(), " of shape ", own.sizes(), " in the model");
}

// Names by what becomes of them; throws where the options do not allow it.
LoadedWeights compare(const NamedTensors& model, const std::vector<SafetensorsFile>& files,
                      const std::string& path, const LoadWeightsOptions& options) {
  LoadedWeights weights;
  weights.file = path;
  std::vector<std::string> misfits;
  std::unordered_map<const void*, bool> has_values;  // by TensorImpl
  for (const auto& [name, tensor] : model) {
    auto found = files.front().find(name);
    for (size_t i = 1; i < files.size() && !found; ++i) found = files[i].find(name);
    has_values[tensor.unsafeGetTensorImpl()] |= found.has_value();
    if (!found) continue;
    const std::string reason = misfit(name, tensor, detail::tensor_dtype(found->dtype), found->shape);
    if (!reason.empty()) misfits.push_back(reason);
  }
  for (const auto& [name, tensor] : model) {
    (has_values.at(tensor.unsafeGetTensorImpl()) ? weights.loaded : weights.missing).push_back(name);
  }
  for (const SafetensorsFile& file : files) {
    for (const std::string_view name : file.names()) {
      if (model.count(std::string(name)) == 0) weights.unexpected.emplace_back(name);
    }
  }

  std::string wrong;
  const auto add = [&](const std::string& text) { wrong += (wrong.empty() ? "" : "; ") + text; };
  if (!misfits.empty()) {
    add(misfits.front());
    if (misfits.size() > 1) add(detail::concatenate(misfits.size() - 1, " more do not fit either"));
  }
  if (!options.allow_missing() && !weights.missing.empty()) {
    add("it has no " + first_few(weights.missing) + ", which allow_missing(true) leaves as they are");
  }
  if (!options.allow_unexpected() && !weights.unexpected.empty()) {
    add("the model has no " + first_few(weights.unexpected) + ", which allow_unexpected(true) passes over");
  }
  require(wrong.empty(), "cannot load weights from ", path, ": ", wrong);
  return weights;
}

}  // namespace

LoadedWeights load_weights(torch::nn::Module& model, const std::string& path,
                           const LoadWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  const WeightsFiles files = find_weights(path);
  const std::string& where = files.paths.size() == 1 ? files.paths.front() : files.folder;
  const NamedTensors tensors = detail::model_tensors(model);
  LoadedWeights weights = compare(tensors, read_headers(files), where, options);
  const NamedTensors values =
      read_values(files, [&](const std::string& name, at::IntArrayRef) -> std::optional<at::Device> {
        const auto own = tensors.find(name);
        return own == tensors.end() ? std::nullopt : std::optional(own->second.device());
      });
  // The file may have changed since its header was compared.
  std::unordered_map<const void*, const NamedTensors::value_type*> first_of;
  for (const auto& item : values) {
    const at::Tensor& own = tensors.at(item.first);
    const std::string reason = misfit(item.first, own, item.second.scalar_type(), item.second.sizes());
    require(reason.empty(), "cannot load weights from ", where, ": ", reason);
    const auto [twin, is_first] = first_of.emplace(own.unsafeGetTensorImpl(), &item);
    require(is_first || twin->second->second.equal(item.second), "cannot load weights from ", where, ": \"",
            twin->second->first, "\" and \"", item.first, "\" are one tensor in the model, but differ there");
  }
  for (const auto& [name, value] : values) tensors.at(name).copy_(value);
  return weights;
}

}  // namespace pacer
