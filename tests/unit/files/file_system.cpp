// Files on a real disk, and what becomes of calls that are interrupted, fall short or fail.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

#include <pacer/core/error.h>
#include <pacer/files/file_system.h>

#include "support/catch.h"
#include "support/files/failing_file_system.h"
#include "support/files/memory_file_system.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

void write_whole_file(FileSystem& files, const std::string& path, const std::string& text) {
  FileWriter out(files, path);
  out.write(text.data(), text.size() / 2);
  out.write(text.data() + text.size() / 2, text.size() - text.size() / 2);
  out.finish();
}

std::string read_whole_file(FileSystem& files, const std::string& path) {
  const std::vector<char> bytes = FileReader(files, path).read();
  return {bytes.begin(), bytes.end()};
}

size_t count_descriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

// A text longer than the piece in which checksums are read.
std::string long_text() {
  std::string text((size_t{1} << 20) + 12345, 'x');
  text += "end";
  return text;
}

}  // namespace

TEST_CASE("a file reads back as it was written, with its size and checksum", "[core][files]") {
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  for (const std::string& text : {std::string(), std::string("short\0text", 10), long_text()}) {
    const std::string path = folder.path("file-" + std::to_string(text.size()));
    {
      FileWriter out(files, path);
      out.write(text.data(), text.size());
      CHECK(out.size() == static_cast<int64_t>(text.size()));
      CHECK(out.checksum() == checksum_of(text));
      out.finish();
      CHECK_THROWS_AS(out.write("x", 1), InvalidArgument);
      CHECK_THROWS_AS(out.finish(), InvalidArgument);
    }
    CHECK(content_of(path) == text);
    CHECK(read_whole_file(files, path) == text);
    CHECK(FileReader(files, path).checksum() == checksum_of(text));
    CHECK(FileReader(files, path).size() == static_cast<int64_t>(text.size()));
  }
}

TEST_CASE("files leave no descriptor open, whatever becomes of them", "[core][files]") {
  if (!std::filesystem::exists("/proc/self/fd")) PACER_SKIP("no /proc/self/fd");
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  const size_t before = count_descriptors();
  write_whole_file(files, folder.path("a"), "text");
  { FileWriter abandoned(files, folder.path("b")); }
  read_whole_file(files, folder.path("a"));
  sync_folder(files, folder.path());
  list_folder(files, folder.path("."));
  folder_exists(files, folder.path());
  CHECK_THROWS_AS(FileReader(files, folder.path(".")), FileError);
  CHECK_THROWS_AS(list_folder(files, folder.path("a")), FileError);
  CHECK(count_descriptors() == before);
}

TEST_CASE("a file is never written over or through a link", "[core][files]") {
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  put_content(folder.path("target"), "kept");
  REQUIRE(::symlink(folder.path("target").c_str(), folder.path("link").c_str()) == 0);
  REQUIRE(::symlink(folder.path("nowhere").c_str(), folder.path("dangling").c_str()) == 0);
  for (const char* name : {"target", "link", "dangling"}) {
    CHECK_THROWS_WITH(FileWriter(files, folder.path(name)),
                      ContainsSubstring(folder.path(name)) && ContainsSubstring(std::strerror(EEXIST)));
  }
  CHECK(content_of(folder.path("target")) == "kept");
  CHECK_FALSE(std::filesystem::exists(folder.path("nowhere")));
  CHECK_THROWS_WITH(FileReader(files, folder.path("link")), ContainsSubstring(std::strerror(ELOOP)));
}

TEST_CASE("what is no regular file is not read, and a pipe is not waited for", "[core][files]") {
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  REQUIRE(::mkfifo(folder.path("pipe").c_str(), 0600) == 0);
  REQUIRE(make_folder(files, folder.path("folder")));
  for (const std::string& path : {folder.path("pipe"), folder.path("folder"), std::string("/dev/null")}) {
    CHECK_THROWS_WITH(FileReader(files, path),
                      ContainsSubstring(path) && ContainsSubstring("not a regular file"));
  }
}

TEST_CASE("folders are made, listed and removed, and links to them are left alone", "[core][files]") {
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  const std::string path = folder.path("new"), link = folder.path("link");
  CHECK_FALSE(folder_exists(files, path));
  CHECK(make_folder(files, path));
  CHECK_FALSE(make_folder(files, path));
  CHECK(folder_exists(files, path));
  write_whole_file(files, path + "/b", "1");
  write_whole_file(files, path + "/a", "2");
  REQUIRE(::symlink(path.c_str(), link.c_str()) == 0);
  CHECK(list_folder(files, path) == std::vector<std::string>{"a", "b"});
  CHECK(list_folder(files, link + "/.") == std::vector<std::string>{"a", "b"});
  CHECK_THROWS_AS(list_folder(files, link), FileError);
  CHECK_THROWS_AS(remove_folder(files, link), FileError);
  sync_folder(files, path);
  rename(files, path + "/a", path + "/c");
  CHECK(list_folder(files, path) == std::vector<std::string>{"b", "c"});
  REQUIRE(make_folder(files, path + "/inner"));
  CHECK_THROWS_AS(remove_folder(files, path), FileError);
  REQUIRE(std::filesystem::remove(path + "/inner"));
  // A link inside is removed, not followed.
  put_content(folder.path("outside"), "kept");
  REQUIRE(::symlink(folder.path("outside").c_str(), (path + "/link").c_str()) == 0);
  remove_folder(files, path);
  CHECK_FALSE(folder_exists(files, path));
  CHECK(content_of(folder.path("outside")) == "kept");
}

TEST_CASE("a folder that exists needs no room on the disk", "[core][files]") {
  const TemporaryFolder folder;
  FailingFileSystem files(posix_file_system());
  files.arm(1, Fault::full_disk);
  make_folders(files, folder.path());
  CHECK_THROWS_AS(make_folders(files, folder.path("new")), FileError);
}

TEST_CASE("a new file has the permissions that the process gives to new files", "[core][files]") {
  const TemporaryFolder folder;
  write_whole_file(posix_file_system(), folder.path("a"), "text");
  const mode_t mask = ::umask(0);
  ::umask(mask);
  struct stat status {};
  REQUIRE(::stat(folder.path("a").c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == (0666 & ~mask));
}

TEST_CASE("a failure names the path and the reason", "[core][files]") {
  const TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  const std::string missing = folder.path("no/such");
  const std::function<void()> actions[] = {[&] { FileWriter(files, missing + "/file"); },
                                           [&] { FileReader(files, missing + "/file"); },
                                           [&] { make_folder(files, missing); },
                                           [&] { sync_folder(files, missing); },
                                           [&] { rename(files, missing, missing + "x"); },
                                           [&] { remove_folder(files, missing); },
                                           [&] { list_folder(files, missing); }};
  for (const auto& action : actions) {
    CHECK_THAT(message_of<FileError>(action),
               ContainsSubstring(missing) && ContainsSubstring(std::strerror(ENOENT)));
  }
  put_content(folder.path("file"), "");
  CHECK_THROWS_WITH(folder_exists(files, folder.path("file")), ContainsSubstring(std::strerror(ENOTDIR)));
  CHECK_THROWS_AS(make_folder(files, folder.path("file/x")), FileError);
}

TEST_CASE("a file that changes while it is read is an error", "[core][files]") {
  MemoryFileSystem files;
  for (const char* changed : {"longer than before", "cut", ""}) {
    for (const bool whole : {true, false}) {
      files.content("/f") = "as it was";
      FileReader reader(files, "/f");
      files.content("/f") = changed;
      CHECK_THAT(message_of<FileError>([&] { whole ? (void)reader.read() : (void)reader.checksum(); }),
                 ContainsSubstring("/f") && ContainsSubstring("changed"));
    }
  }
}

TEST_CASE("interrupted and short calls are finished, failing ones are reported", "[core][files]") {
  const std::string text = long_text();
  for (const Fault fault : {Fault::io_error, Fault::no_space, Fault::interrupted, Fault::short_transfer}) {
    const bool harmless = fault == Fault::interrupted || fault == Fault::short_transfer;
    const char* reason = std::strerror(fault == Fault::no_space ? ENOSPC : EIO);
    int64_t failures = 0;
    for (int64_t call = 1;; ++call) {
      MemoryFileSystem under;
      FailingFileSystem files(under);
      files.arm(call, fault);
      CAPTURE(call, static_cast<int>(fault));
      std::string read, checksum;
      const std::string message = message_of<FileError>([&] {
        make_folder(files, "/folder");
        write_whole_file(files, "/folder/a", text);
        sync_folder(files, "/folder");
        rename(files, "/folder", "/other");
        read = read_whole_file(files, "/other/a");
        checksum = FileReader(files, "/other/a").checksum();
        folder_exists(files, "/other");
        remove_folder(files, "/other");
      });
      CHECK(under.open_descriptors() == 0);
      if (message.empty()) {
        CHECK(read == text);
        CHECK(checksum == checksum_of(text));
      } else {
        ++failures;
        CHECK_FALSE(harmless);
        CHECK_THAT(message, (ContainsSubstring("/folder") || ContainsSubstring("/other")) &&
                                ContainsSubstring(reason));
      }
      if (!files.has_failed()) break;
    }
    // All but the closes of what was only read.
    CHECK(failures == (harmless ? 0 : 22));
  }
}

}  // namespace pacer::testing
