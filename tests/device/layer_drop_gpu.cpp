// Gates by sample on a GPU: the rows of the CPU, in every dtype, and no wait for the device.
#include <vector>

#include <torch/cuda.h>

#include <pacer/schedulers/layer_drop.h>

#include "support/both_devices.h"
#include "support/catch.h"
#include "support/no_waiting.h"
#include "support/schedulers/gate_progress.h"

namespace pacer::testing {

TEST_CASE("on a GPU, a gate by sample drops the rows that it drops on the CPU, and waits for nothing",
          "[gpu][layer_drop]") {
  PACER_NEEDS_GPU();
  LayerDrop gates(LayerDropOptions().theta_bar(0.5).schedule(constant_schedule()).per_sample(true).seed(3));
  gates->add();
  const auto gated = [&](const Tensor& x, int64_t step) {
    gates->set_progress(gate_progress(step));
    return gates->gate(0, x, [](const Tensor& h) { return h * 3; });
  };
  constexpr int64_t kSteps = 20;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
    CAPTURE(dtype);
    const Tensor x = torch::ones({37, 2}, dtype), on_gpu = x.cuda();
    gated(on_gpu, 0);  // memory and libraries
    std::vector<Tensor> found;
    {
      const NoWaiting no_waiting;
      for (int64_t step = 0; step < kSteps; ++step) CHECK_NOTHROW(found.push_back(gated(on_gpu, step)));
    }
    REQUIRE(found.size() == kSteps);
    for (int64_t step = 0; step < kSteps; ++step) {
      CHECK(found[static_cast<size_t>(step)].cpu().equal(gated(x, step)));
    }
  }
}

}  // namespace pacer::testing
