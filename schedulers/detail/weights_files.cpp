#include <pacer/schedulers/detail/weights_files.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <pacer/core/checkpoint_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/file_system.h>
#include <pacer/core/json_scanner.h>
#include <pacer/schedulers/detail/checkpoint_files.h>

namespace pacer::detail {
namespace {

constexpr int64_t kLargestIndex = kMaxSafetensorsHeader;  // bytes

bool is_folder(const std::string& path) {
  FileSystem& files = posix_file_system();
  const int folder = files.open_folder(path);
  if (folder >= 0) files.close(folder);
  return folder >= 0;
}

// The name of one file, and no way to another folder.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

// Which tensor is in which file: {"metadata": {...}, "weight_map": {"NAME": "model-00001-of-00002...", ...}}.
std::map<std::string, std::string> read_index(const std::string& path) {
  FileReader reader(posix_file_system(), path);
  require<FileError>(reader.size() <= kLargestIndex, path, " has ", reader.size(), " bytes; the limit is ",
                     kLargestIndex);
  std::vector<char> text = reader.read();
  JsonScanner scanner(text.data(), text.size(), 0, path);
  std::map<std::string, std::string> file_of;
  bool has_map = false;
  scanner.expect('{');
  if (!scanner.take('}')) {
    do {
      const size_t at = scanner.position();
      const bool is_map = scanner.string() == "weight_map";
      scanner.expect(':');
      if (!is_map) {
        scanner.skip_value();
        continue;
      }
      if (has_map) scanner.fail_at(at, "a second \"weight_map\"");
      has_map = true;
      scanner.expect('{');
      if (scanner.take('}')) continue;
      do {
        const size_t start = scanner.position();
        std::string name(scanner.string());
        scanner.expect(':');
        std::string file(scanner.string());
        if (!is_plain_name(file)) {
          scanner.fail_at(start, "the tensor ", quote_for_message(name), " is said to be in ",
                          quote_for_message(file), ", which is not the name of a file in the folder");
        }
        if (!file_of.emplace(name, std::move(file)).second) {
          scanner.fail_at(start, "the tensor ", quote_for_message(name), " occurs twice");
        }
      } while (scanner.more('}'));
    } while (scanner.more('}'));
  }
  scanner.expect_end();
  require<FileError>(!file_of.empty(), path, " names no file: it has no \"weight_map\", or an empty one");
  return file_of;
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
    return files;
  }
  require<FileError>(
      has(kModelIndex), "cannot load weights from ", folder,
      ": it is no checkpoint, has none in it, and has no model.safetensors; give a safetensors "
      "file, the folder of a checkpoint, a folder of checkpoints or one with the safetensors "
      "files of Hugging Face");
  files.where = folder;
  files.file_of = read_index(without_links(folder + "/" + kModelIndex));
  std::vector<std::string> shards;
  for (const auto& item : files.file_of) shards.push_back(item.second);
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  for (const std::string& shard : shards) {
    require<FileError>(has(shard), "cannot load weights from ", folder, ": ", kModelIndex, " names ",
                       quote_for_message(shard), ", which is not there; the folder needs all of the ",
                       shards.size(), " files that it names");
    files.paths.push_back(without_links(folder + "/" + shard));
  }
  return files;
}

// Each tensor of the index is in its file, and each of the files in the index.
void check_index(const WeightsFiles& files, const std::vector<SafetensorsFile>& headers) {
  std::map<std::string, const SafetensorsFile*> header_of;
  {
    std::vector<std::string> shards;
    for (const auto& item : files.file_of) shards.push_back(item.second);
    std::sort(shards.begin(), shards.end());
    shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
    for (size_t i = 0; i < shards.size(); ++i) header_of[shards[i]] = &headers[i];
  }
  const std::string disagree = concatenate("cannot load weights from ", files.where, ": ", kModelIndex);
  for (const auto& [name, shard] : files.file_of) {
    require<FileError>(header_of.at(shard)->find(name).has_value(), disagree, " says that ",
                       quote_for_message(name), " is in ", quote_for_message(shard),
                       ", but it is not; the files are of different versions or damaged");
  }
  for (const auto& [shard, header] : header_of) {
    for (const std::string_view name : header->names()) {
      const auto said = files.file_of.find(std::string(name));
      require<FileError>(said != files.file_of.end() && said->second == shard, disagree,
                         said == files.file_of.end() ? " does not name " : " does not say that ",
                         quote_for_message(name), said == files.file_of.end() ? ", which is in " : " is in ",
                         quote_for_message(shard), "; the files are of different versions or damaged");
    }
  }
}

}  // namespace

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

std::vector<SafetensorsFile> read_headers(const WeightsFiles& files) {
  std::vector<SafetensorsFile> headers;
  for (const std::string& path : files.paths) {
    FileReader reader(posix_file_system(), path);
    headers.push_back(SafetensorsFile::read_header(reader, path));
  }
  if (!files.file_of.empty()) check_index(files, headers);
  return headers;
}

NamedTensors read_values(const WeightsFiles& files, const TensorPlace& place_of) {
  NamedTensors values;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const auto read = [&](FileReader& reader) {
      values.merge(read_tensors(reader, files.paths[i], place_of));
    };
    if (!files.checkpoint.empty()) {
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
