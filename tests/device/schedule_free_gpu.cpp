// Schedule-Free AdamW on an NVIDIA GPU: the bits of the CPU, in training, in evaluation, and in what the average
// has taken in, of which only the device knows where it decides whether a step counts.
#include "support/catch.h"

#include <cmath>

#include "support/both_devices.h"
#include "support/no_waiting.h"
#include "support/optimizers/schedule_free.h"

namespace pacer::testing {
namespace {

void check_averages(BothDevices<ScheduleFreeAdamW>& both) {
  for (size_t i = 0; i < both.cpu.size(); ++i) {
    if (both.on_cpu.state().count(both.cpu[i].unsafeGetTensorImpl()) == 0) continue;
    const auto& on_cpu = state_of(both.on_cpu, both.cpu[i]);
    const auto& on_gpu = state_of(both.on_gpu, both.gpu[i]);
    REQUIRE(on_cpu.average() == on_gpu.average());
    REQUIRE(on_cpu.average().weight_sum > 0);
  }
}

}  // namespace

TEST_CASE("Schedule-Free AdamW has the same bits on CPU and GPU in every mode", "[schedule-free][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool check : {false, true}) {
      CAPTURE(mode.name, check);
      torch::manual_seed(82);
      const auto options = ScheduleFreeAdamWOptions(0.01)
                               .weight_decay(0.1)
                               .warmup_steps(5)
                               .r(0.7)
                               .weight_lr_power(1.3)
                               .finite_check(check)
                               .seed(3);
      BothDevices<ScheduleFreeAdamW> both(odd_parameters(mode.dtype), with_mode(options, mode));
      for (int step = 0; step < 12; ++step) {
        both.set_gradients();
        both.set_lr(0.01 * (1 + step % 3));
        if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
        if (check && step % 6 == 4) {
          both.cpu[3].grad()[step * 1000].fill_(HUGE_VAL);
          both.gpu[3].grad()[step * 1000].fill_(HUGE_VAL);
        }
        both.step();
        REQUIRE(both.differs() == "");
        check_averages(both);
        if (step % 5 != 4) continue;
        both.on_cpu.eval();
        both.on_gpu.eval();
        REQUIRE(both.differs() == "");
        both.on_cpu.train();
        both.on_gpu.train();
        REQUIRE(both.differs() == "");
      }
    }
  }
}

TEST_CASE("a step of Schedule-Free AdamW never waits for the GPU", "[schedule-free][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(82);
  const auto options = ScheduleFreeAdamWOptions(0.01).warmup_steps(5).r(0.7).finite_check(true);
  BothDevices<ScheduleFreeAdamW> both(odd_parameters(at::kFloat), options);
  both.set_gradients();
  for (int step = 0; step < 3; ++step) both.on_gpu.step();
  const NoWaiting no_waiting;
  for (int step = 0; step < 3; ++step) both.on_gpu.step();
}

}  // namespace pacer::testing
