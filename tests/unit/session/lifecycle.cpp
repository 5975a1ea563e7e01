// Whatever users do between steps, weights are right or the step is refused: the whole table on the CPU.
#include "support/catch.h"

#include <cstdio>

#include "support/optimizers/lifecycle_table.h"

namespace pacer::testing {

TEST_CASE("between steps parameters and states may change as they like: right weights, or one sentence",
          "[lifecycle]") {
  const LifecycleCount count = run_lifecycles(at::kCPU, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  std::printf("lifecycle: %d equal, %d refused (%d of them cannot be made), %zu wrong\n", count.equal,
              count.refused, count.impossible, count.wrong.size());
  INFO(first_lines(count.wrong));
  CHECK(count.wrong.empty());
  // So that nothing that is followed today is refused tomorrow unnoticed. A new optimizer, edit or dtype adds
  // to both.
  CHECK(count.equal == 5838);
  CHECK(count.refused == 3282);
}

}  // namespace pacer::testing
