#include <pacer/files/json_lines.h>

#include <cerrno>
#include <cstring>

#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>

namespace pacer {

void JsonLine::require_new(std::string_view key) {
  const std::string quoted = json_quote(key);
  require(keys_.insert(quoted).second, "the key ", quoted, " was added twice to one JSON line");
}

JsonLinesFile::JsonLinesFile(const std::string& path, Mode mode)
    : path_(path),
      file_(open_stream(path, mode == Mode::append ? StreamMode::append : StreamMode::truncate)) {
  require<FileError>(file_ != nullptr, "cannot open ", path, " for writing: ", std::strerror(errno));
}

void JsonLinesFile::write(const JsonLine& line) {
  const std::string text = line.str() + '\n';
  const bool written =
      std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0;
  const int error = errno;
  require<FileError>(written, "cannot write to ", path_, ": ", std::strerror(error));
}

}  // namespace pacer
