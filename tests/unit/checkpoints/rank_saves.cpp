// What ranks say and send where they save together: each warning once, and no exchange more than it takes.
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/epoch_sampler.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_rank_saves {
namespace {

std::vector<std::unique_ptr<RankTrainer>> two_that_save_to(const std::string& folder) {
  RankSetup setup;
  setup.hooks = [folder](Session& session) {
    session.use(Checkpoints(CheckpointsOptions(folder).every(100).synchronous(true)));
  };
  return trainers_of({setup, setup});
}

size_t times_in(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("ranks that hand out the examples of a sampler that no Session knows are warned once",
          "[checkpoint][sampler][ranks]") {
  const TemporaryFolder folder;
  auto trainers = two_that_save_to(folder.path());
  const CapturedStderr output;
  const std::vector<std::string> messages = run_all(trainers, [](RankTrainer& t, int) {
    EpochSampler sampler(8, 1, *t.parts->shared_world());
    sampler.reset();
    RANK_REQUIRE(sampler.next(2).has_value());
    t.step();
    t.step();
    t.session->finish();
  });
  CHECK(first_of(messages) == "");
  CHECK(times_in(output.text(), "add session.use(sampler)") == 1);
}

TEST_CASE("ranks that save a checkpoint exchange words no more often than it has parts",
          "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  auto trainers = two_that_save_to(folder.path());
  const Communicator& world = trainers[0]->parts->world();
  REQUIRE(first_of(run_all(trainers, [](RankTrainer& t, int) { t.step(); })) == "");
  const int64_t before = traffic_of(world, "agreement").calls;
  REQUIRE(first_of(run_all(trainers,
                           [](RankTrainer& t, int) { t.parts->find<Checkpoints>()->save_now(); })) == "");
  // That they save, and of what step; then a length and a text each for the folder, what they have, what they
  // write, that it is written, and that it is complete.
  CHECK(traffic_of(world, "agreement").calls - before == 1 + 5 * 2);
}

}  // namespace pacer::testing::session_rank_saves
