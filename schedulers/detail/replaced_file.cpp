#include <pacer/schedulers/detail/replaced_file.h>

#include <cerrno>
#include <vector>

#include <pacer/core/file_system.h>

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
  FileSystem& files = posix_file_system();
  const std::string next = path + ".new";
  files.remove_file(next);  // of a run that was killed here; where this fails, the next line says so
  FileWriter writer(files, next);
  writer.write(content.data(), content.size());
  writer.finish();
  rename(files, next, path);
}

}  // namespace pacer::detail
