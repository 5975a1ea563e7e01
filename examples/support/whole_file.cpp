#include "whole_file.h"

#include <pacer/core/error.h>
#include <pacer/files/file_system.h>

namespace examples {

void write_whole_file(const std::string& path, const std::string& text) {
  pacer::FileSystem& files = pacer::posix_file_system();
  const std::string next = path + ".new";
  files.remove_file(next);  // of a program that was killed here; where this fails, the next line says so
  try {
    pacer::FileWriter writer(files, next);
    writer.write(text.data(), text.size());
    writer.finish();
    pacer::rename(files, next, path);
  } catch (const pacer::FileError& error) {
    files.remove_file(next);
    throw pacer::FileError("cannot write " + path + ": " + error.what());
  }
}

}  // namespace examples
