// A rule that is not pacer's on an NVIDIA GPU: the bits of the CPU.
#include "support/catch.h"

#include <cmath>

#include "support/both_devices.h"
#include "support/optimizers/lion.h"

namespace pacer::testing {

TEST_CASE("a rule of one's own has the same bits on CPU and GPU in every mode", "[own_rule][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool check : {false, true}) {
      CAPTURE(mode.name, check);
      torch::manual_seed(82);
      const auto options = lion_options(0.01).weight_decay(0.1).finite_check(check).seed(3);
      BothDevices<Lion> both(odd_parameters(mode.dtype), with_mode(options, mode));
      for (int step = 0; step < 12; ++step) {
        both.set_gradients();
        if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
        if (check && step % 6 == 4) {
          both.cpu[3].grad()[step * 1000].fill_(HUGE_VAL);
          both.gpu[3].grad()[step * 1000].fill_(HUGE_VAL);
        }
        both.step();
        REQUIRE(both.differs() == "");
      }
    }
  }
}

}  // namespace pacer::testing
