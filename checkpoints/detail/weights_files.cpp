#include <pacer/checkpoints/detail/weights_files.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/file_system.h>
#include <pacer/files/json_scanner.h>

namespace pacer::detail {
namespace {

constexpr int64_t kLargestConfig = 1 << 20;  // bytes

bool is_folder(const std::string& path) {
  FileSystem& files = posix_file_system();
  const int folder = files.open_folder(path);
  if (folder >= 0) files.close(folder);
  return folder >= 0;
}

WeightsFiles checkpoint_weights(const std::string& folder) {
  WeightsFiles files;
  files.checkpoint = folder;
  files.entries = model_files(folder, read_manifest(folder));
  for (const CheckpointFile& entry : files.entries) files.paths.push_back(folder + "/" + entry.name);
  files.where = files.paths.size() == 1 ? files.paths.front() : folder;
  return files;
}

// `names`: what is in the folder.
WeightsFiles hugging_face_weights(const std::string& folder, const std::vector<std::string>& names) {
  const auto has = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  WeightsFiles files;
  if (has(kModelFile)) {
    files.where = folder + "/" + kModelFile;
    files.paths = {without_links(files.where)};
    if (has(kModelIndex)) {
      std::fprintf(stderr, "pacer: %s has %s and %s; %s is read\n", folder.c_str(), kModelFile, kModelIndex,
                   kModelFile);
    }
    return files;
  }
  require<FileError>(
      has(kModelIndex), "cannot load weights from ", folder,
      ": it is no checkpoint, has none in it, and has no model.safetensors; give a safetensors "
      "file, the folder of a checkpoint, a folder of checkpoints or one with the safetensors "
      "files of Hugging Face");
  files.where = folder;
  files.index = WeightsIndex::read(without_links(folder + "/" + kModelIndex));
  // Before anything is kept of them: the index may name millions.
  files.index.for_each([&](std::string_view, std::string_view file) {
    if (std::binary_search(names.begin(), names.end(), file)) return;
    throw FileError(concatenate("cannot load weights from ", folder, ": ", kModelIndex, " names ",
                                quote_for_message(file), ", which is not there; the folder needs all of the ",
                                files.index.files().size(), " files that it names"));
  });
  for (const std::string_view file : files.index.files()) {
    files.paths.push_back(without_links(concatenate(folder, '/', file)));
  }
  return files;
}

// Each tensor of the index is in its file, and each of the files in the index.
void check_index(const WeightsFiles& files, const std::vector<SafetensorsFile>& headers) {
  std::map<std::string_view, const SafetensorsFile*> header_of;
  size_t number = 0;
  for (const std::string_view file : files.index.files()) header_of[file] = &headers[number++];
  const std::string disagree = concatenate("cannot load weights from ", files.where, ": ", kModelIndex);
  files.index.for_each([&](std::string_view name, std::string_view file) {
    require<FileError>(header_of.at(file)->find(name).has_value(), disagree, " says that ",
                       quote_for_message(name), " is in ", quote_for_message(file),
                       ", but it is not; the files are of different versions or damaged");
  });
  for (const auto& [file, header] : header_of) {
    for (const std::string_view name : header->names()) {
      const std::optional<std::string_view> said = files.index.file_of(name);
      require<FileError>(said == file, disagree, said ? " does not say that " : " does not name ",
                         quote_for_message(name), said ? " is in " : ", which is in ",
                         quote_for_message(file), "; the files are of different versions or damaged");
    }
  }
}

}  // namespace

std::string read_config_file(const std::string& path) {
  FileReader reader(posix_file_system(), without_links(path));
  require<FileError>(reader.size() <= kLargestConfig, path, " has ", reader.size(), " bytes; the limit is ",
                     kLargestConfig);
  const std::vector<char> text = reader.read();
  return {text.begin(), text.end()};
}

std::string without_links(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  return real ? real.get() : path;
}

WeightsFiles find_weights(const std::string& path) {
  if (!is_folder(path)) {
    WeightsFiles file;
    file.where = path;
    file.paths = {path};
    return file;
  }
  const std::vector<std::string> names = list_folder(posix_file_system(), path + "/.");
  if (std::find(names.begin(), names.end(), kManifestName) != names.end()) return checkpoint_weights(path);
  const std::string newest = find_newest(path);
  return newest.empty() ? hugging_face_weights(path, names) : checkpoint_weights(newest);
}

WeightsFiles find_hugging_face_weights(const std::string& folder) {
  return hugging_face_weights(folder, list_folder(posix_file_system(), folder + "/."));
}

std::vector<SafetensorsFile> read_headers(const WeightsFiles& files) {
  std::vector<SafetensorsFile> headers;
  for (const std::string& path : files.paths) {
    FileReader reader(posix_file_system(), path);
    headers.push_back(SafetensorsFile::read_header(reader, path));
  }
  if (!files.index.empty()) check_index(files, headers);
  return headers;
}

NamedTensors read_values(const WeightsFiles& files, const TensorPlace& place_of) {
  NamedTensors values;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const bool has_checksum = !files.checkpoint.empty();
    const auto read = [&](FileReader& reader) {
      values.merge(
          read_tensors(reader, files.paths[i], place_of, has_checksum ? Unwanted::read : Unwanted::skip));
    };
    if (has_checksum) {
      read_checkpoint_file(files.checkpoint, files.entries[i], read);
    } else {
      FileReader reader(posix_file_system(), files.paths[i]);
      read(reader);
      reader.finish();
    }
  }
  return values;
}

}  // namespace pacer::detail
