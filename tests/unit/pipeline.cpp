// Pipelines of threads as ranks against one rank with the whole model: gradients and weights to the bit.
#include <pacer/schedulers/pipeline.h>

#include "support/pipeline_runs.h"

namespace pacer::testing::pipelines {
namespace {

struct Schedule {
  const char* name;
  std::function<PipelineShape(int64_t)> plan;
  int64_t chunks = 1;
};
const std::vector<Schedule> kSchedules = {
    {"gpipe", gpipe},
    {"1f1b", one_f_one_b},
    {"zero bubble", zero_bubble},
    {"interleaved", [](int64_t m) { return interleaved(m, 2); }, 2},
};

}  // namespace

TEST_CASE("a pipeline has the gradients of the whole model, to the bit", "[pipeline]") {
  for (const int64_t micro_batches : {1, 3, 8}) {
    Setup setup;
    setup.micro_batches = micro_batches;
    const Result whole = run_whole(setup);
    for (const Schedule& schedule : kSchedules) {
      for (const int stages : {1, 2, 3}) {
        if (schedule.chunks > 1 && micro_batches % stages != 0) continue;
        INFO(schedule.name << ", " << stages << " stages, " << micro_batches << " micro-batches");
        const Result piped = run_piped(setup, schedule.plan(micro_batches), stages);
        require_same(whole, piped);
        for (size_t i = 0; i < whole.losses.size(); ++i) {
          REQUIRE(piped.losses[i] == Catch::Approx(whole.losses[i]).epsilon(1e-6));
        }
        REQUIRE(piped.evaluated == Catch::Approx(whole.evaluated).epsilon(1e-6));
      }
    }
  }
}

}  // namespace pacer::testing::pipelines
