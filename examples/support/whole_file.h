// Writes a file of text that appears whole or not at all.
#pragma once

#include <string>

namespace examples {

// In place of one that is there. pacer::FileError with the path and the system's reason where that cannot be;
// then what was there is as it was.
void write_whole_file(const std::string& path, const std::string& text);

}  // namespace examples
