// A disk with room for 0, 1, 2 ... pages more, until what is written fits: a small file system in memory,
// which only the thread of the test sees. What has a final name is whole then, as it was before or as it is
// to be.
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/files/json_lines.h>
#include <pacer/files/tensorboard_events.h>
#include <pacer/metrics/detail/metrics_csv.h>

#include <support/whole_file.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/checkpoints/weight_files.h"

namespace pacer::testing {
namespace {
namespace full_disk {

constexpr int64_t kPage = 4096, kPages = 64;

// Calls f in a thread that has such a disk at `folder`. False where this user may not mount one.
bool with_small_disk(const std::string& folder, const std::function<void()>& f) {
  bool mounted = false;
  std::exception_ptr failure;
  std::thread([&] {
    const std::string size = "size=" + std::to_string(kPage * kPages);
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder.c_str(), "tmpfs", 0, size.c_str()) != 0) {
      return;
    }
    mounted = true;
    try {
      f();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    umount(folder.c_str());
  }).join();
  if (failure) std::rethrow_exception(failure);
  return mounted;
}

// Something that pacer writes into a folder. Both versions differ, and fit the disk together with one more.
struct Written {
  std::string name;
  std::function<void(const std::string& folder, int version)> write;
};

using Contents = std::map<std::string, std::string>;

Contents contents_below(const std::string& folder) {
  Contents contents;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().filename() != "filler")
      contents[entry.path().string()] = content_of(entry.path().string());
  }
  return contents;
}

// Leaves so many pages.
void fill(const std::string& folder, int64_t pages) {
  const std::string path = folder + "/filler";
  std::filesystem::remove(path);
  const auto room = static_cast<int64_t>(std::filesystem::space(folder).available) / kPage - pages;
  if (room > 0) put_content(path, std::string(static_cast<size_t>(room * kPage), 'x'));
}

struct Failures {
  int64_t tried = 0;
  std::vector<std::string> complaints;
};

// Writes the second version where there is room for `pages`. Returns whether it fitted.
bool try_write(const Written& written, const std::string& folder, int64_t pages, const Contents& first,
               const Contents& second, Failures& failures) {
  fill(folder, pages);
  std::string message;
  try {
    written.write(folder, 2);
  } catch (const FileError& error) {
    message = error.what();
  } catch (const std::exception& error) {
    failures.complaints.push_back(written.name + ": not a FileError: " + error.what());
  }
  ++failures.tried;
  const Contents found = contents_below(folder);
  const std::string where = written.name + " with " + std::to_string(pages) + " pages: ";
  if (message.empty()) {
    if (found != second) failures.complaints.push_back(where + "said nothing, but is not there");
    return true;
  }
  if (!contains(message, folder) || !contains(message, std::strerror(ENOSPC)))
    failures.complaints.push_back(where + message);
  if (found != first) failures.complaints.push_back(where + "what was there changed, or something stayed");
  return false;
}

Failures failures_of(const Written& written, const std::string& folder) {
  Failures failures;
  const auto write_alone = [&](int version) {
    written.write(folder, version);
    return contents_below(folder);
  };
  const auto clear = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) std::filesystem::remove_all(entry);
  };
  Contents first = write_alone(1);
  const Contents second = write_alone(2);
  for (int64_t pages = 0; pages < kPages; ++pages) {
    clear();
    first = write_alone(1);
    if (try_write(written, folder, pages, first, second, failures)) break;
    fill(folder, kPages);
    if (write_alone(2) != second)
      failures.complaints.push_back(written.name + ": not written once there is room");
  }
  clear();
  return failures;
}

std::vector<Written> all_written() {
  const auto model_of = [](int version) {
    torch::manual_seed(static_cast<uint64_t>(version));
    return torch::nn::Linear(64, 40);
  };
  const auto adapted_of = [](int version) {
    torch::manual_seed(static_cast<uint64_t>(version));
    FileNet model;
    modules::add_lora(*model, modules::LoraOptions(40).targets({"block.up", "block.down"}));
    return model;
  };
  return {
      {"save_weights",
       [=](const std::string& folder, int version) {
         save_weights(*model_of(version), folder + "/weights.safetensors");
       }},
      {"save_adapter", [=](const std::string& folder,
                           int version) { save_adapter(*adapted_of(version), folder + "/adapter"); }},
      {"a file of an example",
       [](const std::string& folder, int version) {
         examples::write_whole_file(folder + "/report.html",
                                    std::string(9000, static_cast<char>('0' + version)));
       }},
  };
}

}  // namespace full_disk
}  // namespace

TEST_CASE("a full disk leaves what was there, and is told of with path and reason", "[faults][disk]") {
  using namespace full_disk;
  const TemporaryFolder folder;
  std::map<std::string, Failures> all;
  const bool mounted = with_small_disk(folder.path(), [&] {
    for (const Written& written : all_written()) all[written.name] = failures_of(written, folder.path());
  });
  if (!mounted) PACER_SKIP("this user may not mount a file system");
  for (const auto& [name, failures] : all) {
    CAPTURE(name);
    CHECK(failures.tried > 2);
    for (const std::string& complaint : failures.complaints) CHECK(complaint == "");
  }
}

TEST_CASE("logs on a full disk go on where it stopped them, or say what is lost", "[faults][disk]") {
  using namespace full_disk;
  const TemporaryFolder folder;
  std::map<std::string, std::string> messages;
  const bool mounted = with_small_disk(folder.path(), [&] {
    const auto message_of_full_disk = [&](const std::string& name, const std::function<void()>& write) {
      fill(folder.path(), 0);
      try {
        for (int i = 0; i < 200; ++i) write();
      } catch (const FileError& error) {
        messages[name] = error.what();
      }
      fill(folder.path(), kPages);
      write();
    };
    JsonLinesFile lines(folder.path("log.jsonl"));
    detail::MetricsCsv table(folder.path("metrics.csv"), /*step=*/0);
    TensorBoardFile events(folder.path("events"));
    message_of_full_disk("log.jsonl", [&] { lines.write(JsonLine().add("text", std::string(100, 'x'))); });
    message_of_full_disk("metrics.csv", [&] { table.write({1, 2, {{"loss", 0.5}}}); });
    message_of_full_disk("events", [&] {
      events.add_scalar("loss", 1, 0.5F);
      events.flush();
    });
  });
  if (!mounted) PACER_SKIP("this user may not mount a file system");
  CHECK(messages.size() == 3);
  for (const auto& [name, message] : messages) {
    CHECK(contains(message, folder.path(name)));
    CHECK(contains(message, std::strerror(ENOSPC)));
  }
}

}  // namespace pacer::testing
