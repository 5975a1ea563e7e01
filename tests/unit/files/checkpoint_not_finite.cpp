// Which checkpoint a run goes on from where parameters are not finite, and what it is told of that.
#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/files/memory_file_system.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

void save(FileSystem& files, int64_t step, bool is_finite) {
  CheckpointWriter writer(files, "/root", step);
  writer.write("model.safetensors", [](ByteSink& out) { out.write("x", 1); });
  CheckpointFacts facts;
  facts.is_finite = is_finite;
  writer.commit(facts);
}

}  // namespace

TEST_CASE("where no checkpoint has finite parameters, the newest whole one is taken, and said to be",
          "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3}) save(files, step, /*is_finite=*/false);
  files.content("/root/step-0000000003/model.safetensors")[0] ^= 1;
  const NewestCheckpoint newest = find_newest_checkpoint("/root", files);
  REQUIRE(newest.checkpoint);
  CHECK(newest.checkpoint->step == 2);
  REQUIRE(newest.passed_over.size() == 3);
  CHECK_THAT(newest.passed_over[0], ContainsSubstring("passed over the checkpoint /root/step-0000000003"));
  CHECK(newest.passed_over[1] ==
        "took the checkpoint /root/step-0000000002 though its parameters are not finite, because none has "
        "finite ones");
  CHECK_THAT(newest.passed_over[2], ContainsSubstring("passed over the checkpoint /root/step-0000000001"));
}

TEST_CASE("where an older checkpoint has finite parameters, newer ones are passed over",
          "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3}) save(files, step, /*is_finite=*/step == 1);
  const NewestCheckpoint newest = find_newest_checkpoint("/root", files);
  REQUIRE(newest.checkpoint);
  CHECK(newest.checkpoint->step == 1);
  REQUIRE(newest.passed_over.size() == 2);
  for (const std::string& reason : newest.passed_over) {
    CHECK_THAT(reason, ContainsSubstring("passed over") && ContainsSubstring("not finite"));
  }
}

}  // namespace pacer::testing
