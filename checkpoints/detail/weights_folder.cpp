#include <pacer/checkpoints/detail/weights_folder.h>

#include <optional>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/files/detail/replaced_file.h>
#include <pacer/files/file_system.h>

namespace pacer::detail {

std::string path_in(const std::string& folder, const char* file) {
  return folder + (folder.back() == '/' ? "" : "/") + file;
}

void replace_weights_and_config(const std::string& folder, const char* weights, const NamedTensors& tensors,
                                const char* config, const std::string& text) {
  FileSystem& files = posix_file_system();
  make_folders(files, folder);
  const std::string model_path = path_in(folder, weights), config_path = path_in(folder, config);
  const std::optional<std::string> before = content_if_there(config_path);
  write_next(model_path, [&](ByteSink& out) { write_tensors(out, tensors, {{"format", "pt"}}); });
  try {
    write_next(config_path, [&](ByteSink& out) { out.write(text.data(), text.size()); });
  } catch (...) {
    files.remove_file(model_path + ".new");
    throw;
  }
  // Tensors never lie beside what was said of other ones: while they change there are none.
  if (before && *before != text) {
    remove_file(files, config_path);
    sync_folder(files, folder);
  }
  put_next_in_place(model_path);
  sync_folder(files, folder);
  put_next_in_place(config_path);
  sync_folder(files, folder);
}

}  // namespace pacer::detail
