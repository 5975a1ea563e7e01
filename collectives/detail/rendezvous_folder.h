// Folders that only this user can enter. Whoever can write to the file through which ranks meet can join
// them, so the file lies in such a folder or not at all.
#pragma once

#include <string>

namespace pacer::detail {

// Opens the folder of `path`, without following a link in its last part, and returns the descriptor. Throws
// InvalidArgument unless it is a folder of this user with mode 0700 or less.
int open_private_folder(const std::string& path);
// The folder that holds `path`: "." where it names none.
std::string folder_of(const std::string& path);
// What follows the folder.
std::string name_in_folder(const std::string& path);
// For the files of launches on this host: $XDG_RUNTIME_DIR/pacer, or pacer-UID in $TMPDIR or /tmp. Makes it
// where it is missing. Throws InvalidArgument.
std::string private_folder_of_user();

}  // namespace pacer::detail
