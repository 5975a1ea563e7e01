// Whatever users do between steps, weights are right or the step is refused: the whole table on the CPU, of whose memory
// orders some take turns unless tests may take long.
#include "support/catch.h"

#include <cstdio>

#include "support/optimizers/lifecycle_table.h"
#include "support/samples.h"

namespace pacer::testing {

TEST_CASE("between steps parameters and states may change as they like: right weights, or one sentence",
          "[lifecycle]") {
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16, at::kDouble};
  if (wants_long_tests()) dtypes.push_back(at::kHalf);
  const LifecycleCount count =
      run_lifecycles(at::kCPU, dtypes, kAllLayouts, /*by_turns=*/!wants_long_tests());
  std::printf("lifecycle: %d equal, %d refused (%d of them cannot be made), %zu wrong\n", count.equal,
              count.refused, count.impossible, count.wrong.size());
  INFO(first_lines(count.wrong));
  CHECK(count.wrong.empty());
  // So that nothing that is followed today is refused tomorrow unnoticed. A new optimizer, edit or dtype adds
  // to both.
  CHECK(count.equal == (wants_long_tests() ? 6098 : 2348));
  CHECK(count.refused == (wants_long_tests() ? 3502 : 1252));
}

}  // namespace pacer::testing
