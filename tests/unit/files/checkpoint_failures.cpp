// Saving on a disk that fails: the n-th call of the file system fails, for n = 1, 2, 3 ... until none is left
// to fail, in every way of `Fault`, and with the power cut at each. Whatever happens, the previous checkpoint
// loads to the byte, and the next save leaves nothing behind.
#include <cerrno>
#include <cstring>
#include <string>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/files/failing_file_system.h"
#include "support/files/memory_file_system.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr Fault kAllFaults[] = {Fault::io_error,       Fault::no_space,  Fault::interrupted,
                                Fault::short_transfer, Fault::full_disk, Fault::dead};
constexpr uint64_t kFormer = 1, kSaved = 2, kNext = 3;  // seeds of contents

// Of a save: of a new step, of one that exists, and of the first under a root that does not exist.
struct SaveScenario {
  const char* name;
  int64_t step;
  bool has_former;  // step 5
};
constexpr SaveScenario kSaveScenarios[] = {
    {"new step", 6, true}, {"same step", 5, true}, {"first", 6, false}};

// The content of the newest checkpoint; empty where there is none.
FileContents newest_contents(FileSystem& files, const std::string& root) {
  const NewestCheckpoint newest = find_newest_checkpoint(root, files);
  CHECK(newest.passed_over.empty());  // a failed save leaves nothing that looks like a checkpoint
  return newest.checkpoint ? loaded_contents(files, newest.checkpoint->folder) : FileContents{};
}

void check_next_save(FileSystem& files, const std::string& root, const SaveScenario& scenario, bool saved) {
  save_checkpoint(files, root, 7, sample_contents(kNext));
  CHECK(newest_contents(files, root) == sample_contents(kNext));
  std::vector<std::string> expected;
  if (scenario.has_former) expected.emplace_back("step-0000000005");
  if (saved && scenario.step != 5) expected.emplace_back("step-0000000006");
  expected.emplace_back("step-0000000007");
  CHECK(list_folder(files, root) == expected);
}

// One save whose call number `call` fails. Returns whether there was such a call.
bool try_failing_save(FileSystem& under, const std::string& root, const SaveScenario& scenario, int64_t call,
                      Fault fault) {
  if (scenario.has_former) save_checkpoint(under, root, 5, sample_contents(kFormer));
  FailingFileSystem files(under);
  files.arm(call, fault);
  CAPTURE(scenario.name, call, static_cast<int>(fault));
  const std::string message =
      message_of<FileError>([&] { save_checkpoint(files, root, scenario.step, sample_contents(kSaved)); });
  const bool has_failed = files.has_failed();
  files.arm(INT64_MAX, fault);

  const FileContents former = scenario.has_former ? sample_contents(kFormer) : FileContents{};
  bool saved = true;
  if (folder_exists(under, root)) {
    // After an error past the last rename the new checkpoint may be there, and is then whole.
    const FileContents newest = newest_contents(under, root);
    saved = newest == sample_contents(kSaved);
    CHECK((saved || newest == former));
    // Under its own name too, unless the process died between two renames, or the disk with it.
    if (scenario.has_former && (scenario.step != 5 || fault != Fault::dead)) {
      CHECK(loaded_contents(under, root + "/step-0000000005") ==
            (saved && scenario.step == 5 ? sample_contents(kSaved) : former));
    }
  } else {
    saved = false;
  }
  if (message.empty()) {
    CHECK(saved);
  } else {
    CHECK(has_failed);
    CHECK(fault != Fault::interrupted);
    CHECK(fault != Fault::short_transfer);
    const bool space = fault == Fault::no_space || fault == Fault::full_disk;
    CHECK_THAT(message, ContainsSubstring(root) && ContainsSubstring(std::strerror(space ? ENOSPC : EIO)));
  }
  check_next_save(under, root, scenario, saved);
  return has_failed;
}

}  // namespace

TEST_CASE("a save whose n-th call fails loses nothing, for every n", "[core][checkpoint]") {
  int64_t tried = 0;
  for (const SaveScenario& scenario : kSaveScenarios) {
    for (const Fault fault : kAllFaults) {
      for (int64_t call = 1;; ++call, ++tried) {
        MemoryFileSystem files;
        const bool has_failed = try_failing_save(files, "/root", scenario, call, fault);
        CHECK(files.open_descriptors() == 0);
        if (!has_failed) break;
      }
    }
  }
  CHECK(tried > 800);
}

TEST_CASE("a save whose n-th call fails loses nothing on a real disk", "[core][checkpoint]") {
  for (const SaveScenario& scenario : kSaveScenarios) {
    for (int64_t call = 1;; ++call) {
      const TemporaryFolder folder;
      const Fault fault = call % 2 == 0 ? Fault::io_error : Fault::dead;
      if (!try_failing_save(posix_file_system(), folder.path("root"), scenario, call, fault)) break;
    }
  }
}

TEST_CASE("a power cut at the n-th call loses nothing that was committed, for every n",
          "[core][checkpoint]") {
  for (const SaveScenario& scenario : kSaveScenarios) {
    for (const bool names_survive : {false, true}) {
      for (int64_t call = 1;; ++call) {
        CAPTURE(scenario.name, names_survive, call);
        MemoryFileSystem under;
        if (scenario.has_former) save_checkpoint(under, "/root", 5, sample_contents(kFormer));
        FailingFileSystem files(under);
        files.arm(call, Fault::dead);
        const std::string message = message_of<FileError>(
            [&] { save_checkpoint(files, "/root", scenario.step, sample_contents(kSaved)); });
        under.power_cut(names_survive);

        const FileContents newest = newest_contents(under, "/root");
        const bool saved = newest == sample_contents(kSaved);
        if (message.empty()) {
          CHECK(saved);  // what commit() returned from is there
        } else if (scenario.has_former) {
          CHECK((saved || newest == sample_contents(kFormer)));
        } else {
          CHECK((saved || newest.empty()));
        }
        check_next_save(under, "/root", scenario, saved);
        if (!files.has_failed()) break;
      }
    }
  }
}

TEST_CASE("folders above the root that were made for a checkpoint survive a power cut",
          "[core][checkpoint]") {
  for (const bool half : {false, true}) {
    CAPTURE(half);
    MemoryFileSystem files;
    if (half) {
      REQUIRE(make_folder(files, "/a"));
      sync_folder(files, "/");
    }
    save_checkpoint(files, "/a/b/root", 6, sample_contents(kSaved));
    files.power_cut(/*names_survive=*/false);
    CHECK(newest_contents(files, "/a/b/root") == sample_contents(kSaved));
  }
}

TEST_CASE("a file that reads back otherwise than it was written is not committed", "[core][checkpoint]") {
  MemoryFileSystem files;
  save_checkpoint(files, "/root", 5, sample_contents(kFormer));
  {
    CheckpointWriter writer(files, "/root", 5);
    writer.write("model.safetensors", [](ByteSink& out) { out.write("abc", 3); });
    files.content("/root/.step-0000000005.partial/model.safetensors")[1] ^= 4;
    CHECK_THROWS_WITH(writer.commit({}),
                      ContainsSubstring("model.safetensors") && ContainsSubstring("checksum"));
  }
  CHECK(newest_contents(files, "/root") == sample_contents(kFormer));
  CHECK(list_folder(files, "/root") == std::vector<std::string>{"step-0000000005"});
}

TEST_CASE("a removal of old checkpoints that fails at its n-th call harms no other", "[core][checkpoint]") {
  for (const Fault fault : {Fault::io_error, Fault::dead}) {
    for (int64_t call = 1;; ++call) {
      CAPTURE(call, static_cast<int>(fault));
      MemoryFileSystem under;
      for (const int64_t step : {1, 2, 3}) save_checkpoint(under, "/root", step, sample_contents(kFormer));
      FailingFileSystem files(under);
      files.arm(call, fault);
      message_of<FileError>([&] { remove_old_checkpoints("/root", 2, files); });
      for (const int64_t step : {2, 3}) {
        CHECK(loaded_contents(under, "/root/step-000000000" + std::to_string(step)) ==
              sample_contents(kFormer));
      }
      const size_t count = list_checkpoints("/root", under).size();
      CHECK((count == 2 || loaded_contents(under, "/root/step-0000000001") == sample_contents(kFormer)));
      remove_old_checkpoints("/root", 2, under);
      CHECK(list_folder(under, "/root") == std::vector<std::string>{"step-0000000002", "step-0000000003"});
      if (!files.has_failed()) break;
    }
  }
}

}  // namespace pacer::testing
