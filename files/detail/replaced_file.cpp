#include <pacer/files/detail/replaced_file.h>

#include <cerrno>
#include <vector>

namespace pacer::detail {

std::optional<std::string> content_if_there(const std::string& path) {
  FileSystem& files = posix_file_system();
  const int opened = files.open_file(path);
  if (opened == -ENOENT) return std::nullopt;
  if (opened >= 0) files.close(opened);
  const std::vector<char> bytes = FileReader(files, path).read();
  return std::string(bytes.begin(), bytes.end());
}

void replace_file(const std::string& path, std::string_view content) {
  write_next(path, [&](ByteSink& out) { out.write(content.data(), content.size()); });
  put_next_in_place(path);
}

void write_next(const std::string& path, const std::function<void(ByteSink&)>& write) {
  FileSystem& files = posix_file_system();
  const std::string next = path + ".new";
  files.remove_file(next);  // of a run that was killed here; where this fails, the next line says so
  FileWriter writer(files, next);
  try {
    write(writer);
    writer.finish();
  } catch (...) {
    files.remove_file(next);
    throw;
  }
}

void put_next_in_place(const std::string& path) { rename(posix_file_system(), path + ".new", path); }

std::string folder_of_file(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace pacer::detail
