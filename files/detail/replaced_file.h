// Files that are read and replaced as a whole.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <pacer/files/file_system.h>

namespace pacer::detail {

// Nothing where there is no such file. FileError where it cannot be read.
std::optional<std::string> content_if_there(const std::string& path);

// Whenever the process is killed, the path has the old content or the new one. Goes through PATH.new, which
// is overwritten. FileError.
void replace_file(const std::string& path, std::string_view content);

// The same of a file that `write` writes piece by piece, in two steps, so that several files can be replaced
// together: the first returns when the disk has PATH.new, the second puts it in place. The folder's entry is
// the caller's to sync. Where the first throws, there is no PATH.new.
void write_next(const std::string& path, const std::function<void(ByteSink&)>& write);
void put_next_in_place(const std::string& path);

// The folder that the file is in, as sync_folder takes it.
std::string folder_of_file(const std::string& path);

}  // namespace pacer::detail
