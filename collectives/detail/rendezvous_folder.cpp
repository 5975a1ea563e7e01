// The checks look at the open folder, not at its name, so that nobody can exchange it in between.
#include <pacer/collectives/detail/rendezvous_folder.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>
#include <pacer/core/file_descriptor.h>

namespace pacer::detail {
namespace {

constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

std::string value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string name_in_folder(const std::string& path) { return path.substr(path.rfind('/') + 1); }

int open_private_folder(const std::string& path) {
  const int folder =
      above_standard_streams(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  // A link to a folder is no folder here.
  require(folder >= 0, "the folder ", path, " cannot hold the file through which ranks meet: ",
          errno == ENOTDIR || errno == ELOOP ? "it is a link or no folder" : std::strerror(errno),
          "; name a folder of your own, made with mkdir -m 700");
  struct stat found = {};
  const bool known = ::fstat(folder, &found) == 0;
  if (known && found.st_uid == ::geteuid() && (found.st_mode & kOthers) == 0) return folder;
  ::close(folder);
  require(known && found.st_uid == ::geteuid(), "the folder ", path,
          " belongs to another user, who could join the ranks that meet there; name a folder of your own, "
          "made with mkdir -m 700");
  throw InvalidArgument("other users may enter the folder " + path +
                        " and join the ranks that meet there; run chmod 700 on it, or name another");
}

std::string private_folder_of_user() {
  std::string folder = value_of("XDG_RUNTIME_DIR");
  if (!folder.empty()) {
    folder += "/pacer";
  } else {
    const std::string temporary = value_of("TMPDIR");
    folder = (temporary.empty() ? "/tmp" : temporary) + "/pacer-" + std::to_string(::geteuid());
  }
  require(::mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST, "cannot make the folder ", folder,
          ", where the processes of this launch would meet: ", std::strerror(errno),
          "; set TMPDIR, or MASTER_ADDR and MASTER_PORT");
  ::close(open_private_folder(folder));
  return folder;
}

std::string rendezvous_file(const std::string& job) {
  require(!job.empty() && job.find('/') == std::string::npos, "a launch named \"", job,
          "\" cannot meet through a file");
  return private_folder_of_user() + "/" + job;
}

}  // namespace pacer::detail
