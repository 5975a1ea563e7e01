// A checkpoint that is written beside training while the n-th call of the system fails for the thread that
// writes it, for n = 1, 2, 3 ... until none is left to fail.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>

#include <pacer/files/checkpoint_folder.h>

#include "failing_calls.h"
#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {
namespace background_writer {

using Catch::Matchers::ContainsSubstring;

struct Fault {
  const char* name;
  CallFault call;
  bool is_an_error;  // else the call is made again, or finished
};
const Fault kFaults[] = {{"EIO", {EIO}, true},
                         {"ENOSPC", {ENOSPC}, true},
                         {"full disk", {ENOSPC, /*stays=*/true}, true},
                         {"EINTR", {EINTR}, false},
                         {"short write", {}, false}};

// What a step throws, "" for nothing.
std::string message_of_step(SmallRun& run) {
  try {
    run.step();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

// A run that saves after steps 1, 2 and 4; a call of the second save fails. Returns whether there was one.
bool try_background_save(int64_t nth, const Fault& fault) {
  const TemporaryFolder folder;
  SmallRun run(registered_optimizer("FusedAdamW"), {}, /*dropout=*/0);
  run.session->use(Checkpoints(CheckpointsOptions(folder.path("run")).every(2).keep(9)));
  FileSystem& files = posix_file_system();
  run.step();
  const std::string first = run.parts->find<Checkpoints>()->save_now();
  const FileContents former = loaded_contents(files, first);
  bool has_failed = false;
  std::string while_written, at_next_save;
  {
    const FailingCalls calls(folder.path("run"), nth, fault.call);
    while_written = message_of_step(run);  // 2, whose save goes on beside step 3
    while_written += message_of_step(run);
    at_next_save = message_of_step(run);
    has_failed = calls.has_failed();
  }
  CAPTURE(nth, fault.name, at_next_save);
  CHECK(while_written == "");
  CHECK(run.session->progress().step == 4);
  CHECK(loaded_contents(files, first) == former);
  const NewestCheckpoint newest = find_newest_checkpoint(folder.path("run"));
  CHECK(newest.passed_over.empty());
  REQUIRE(newest.checkpoint);
  const bool saved = newest.checkpoint->step >= 2;
  if (!at_next_save.empty()) {
    CHECK((has_failed && fault.is_an_error));
    CHECK_THAT(at_next_save,
               ContainsSubstring(folder.path("run")) && ContainsSubstring(std::strerror(fault.call.error)));
  } else {
    CHECK(saved);
  }
  const CapturedStderr quiet;
  run.finish();
  std::vector<std::string> expected = {"step-0000000001", "step-0000000004"};
  if (saved) expected.insert(expected.begin() + 1, "step-0000000002");
  CHECK(list_folder(files, folder.path("run")) == expected);
  CHECK(find_newest_checkpoint(folder.path("run")).checkpoint->step == 4);
  return has_failed;
}

}  // namespace background_writer
}  // namespace

TEST_CASE("training learns at the next save of a call that failed beside it, for every call",
          "[faults][disk]") {
  using namespace background_writer;
  static const bool all = std::getenv("PACER_TEST_LONG") != nullptr;
  for (const Fault& fault : kFaults) {
    int64_t nth = 1;
    for (const int64_t step = all                       ? 1
                              : fault.call.error == EIO ? 3
                                                        : 9;
         try_background_save(nth, fault); nth += step) {
    }
    CHECK(nth > 30);
  }
}

}  // namespace pacer::testing
