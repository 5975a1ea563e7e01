// Whatever users do between steps, weights are right or the step is refused: the whole table on a GPU.
#include "support/both_devices.h"
#include "support/catch.h"

#include <cstdio>

#include "support/optimizers/lifecycle_table.h"

namespace pacer::testing {

TEST_CASE("on a GPU, too, parameters and states may change between steps: right weights, or one sentence",
          "[lifecycle][gpu]") {
  PACER_NEEDS_GPU();
  const at::Device gpu(at::kCUDA, 0);
  const bool small = wants_small_tests();
  const auto dtypes = small ? std::vector<at::ScalarType>{at::kFloat, at::kBFloat16}
                            : std::vector<at::ScalarType>{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
  const auto layouts = small ? std::vector<Layout>{Layout::row_major, Layout::channels_last} : kAllLayouts;
  const LifecycleCount count = run_lifecycles(gpu, dtypes, layouts);
  std::printf("lifecycle on a GPU: %d equal, %d refused, %zu wrong\n", count.equal, count.refused,
              count.wrong.size());
  INFO(first_lines(count.wrong));
  CHECK(count.wrong.empty());
}

}  // namespace pacer::testing
