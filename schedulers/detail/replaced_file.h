// Small files that are read and replaced as a whole.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace pacer::detail {

// Nothing where there is no such file. FileError where it cannot be read.
std::optional<std::string> content_if_there(const std::string& path);

// Whenever the process is killed, the path has the old content or the new one. Goes through PATH.new, which
// is overwritten. FileError.
void replace_file(const std::string& path, std::string_view content);

}  // namespace pacer::detail
