// Optimizers that own parts of parameters, on a GPU in a world of one rank: values, norms and trust ratios
// have the bits of whole tensors, and a step never waits for the device.
#include "support/catch.h"

#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/both_devices.h"
#include "support/captured_stderr.h"
#include "support/no_waiting.h"
#include "support/optimizers/contract.h"

namespace pacer::testing::shared_optimizers_gpu {
namespace {

const at::Device kGpu("cuda:0");
// Several units of the norm, one element, none.
const std::vector<std::vector<int64_t>> kShapes = {{300, 350}, {1}, {0, 3}, {130}, {40000}};

std::vector<Tensor> make_parameters(at::ScalarType dtype) {
  torch::manual_seed(5);
  std::vector<Tensor> parameters;
  for (const auto& shape : kShapes) {
    parameters.push_back(torch::randn(shape, kGpu).to(dtype).requires_grad_(true));
  }
  return parameters;
}

StepInputs inputs_with(const std::shared_ptr<GradientGuard>& guard) {
  StepInputs inputs;
  inputs.guard = guard;
  return inputs;
}

void step(SessionOptimizer& optimizer, const StepInputs& inputs) {
  const torch::NoGradGuard no_grad;
  contract(optimizer).prepare(inputs);
  contract(optimizer).conclude(contract(optimizer).enqueue());
}

// `settled`: the first step that must not wait for the device.
template <class Optimizer, class Options>
void compare(at::ScalarType dtype, const Options& options, int settled = 2) {
  const std::vector<Tensor> plain = make_parameters(dtype), shared = make_parameters(dtype);
  Optimizer of_plain(plain, options), of_shared(shared, options);
  const auto guard = std::make_shared<GradientGuard>(kGpu), same = std::make_shared<GradientGuard>(kGpu);
  guard->clip_to(0.5);
  same->clip_to(0.5);
  ParameterRanges ranges;
  for (const Tensor& parameter : shared) {
    const Tensor values = parameter.detach().clone().view({-1});
    const int64_t count = parameter.numel();
    ranges[parameter.unsafeGetTensorImpl()] = {0, count, {0, count}, torch::zeros_like(values), values};
  }
  contract(of_shared).update_only(ranges, Communicator::alone(kGpu));
  for (int number = 0; number < settled + 2; ++number) {
    for (size_t i = 0; i < plain.size(); ++i) {
      const Tensor gradient = torch::randn(plain[i].sizes(), kGpu).to(dtype);
      plain[i].mutable_grad() = gradient;
      ranges[shared[i].unsafeGetTensorImpl()].gradient.copy_(gradient.view({-1}));
    }
    step(of_plain, inputs_with(guard));
    if (number < settled) {
      step(of_shared, inputs_with(same));
    } else {
      const NoWaiting no_waiting;
      CHECK_NOTHROW(step(of_shared, inputs_with(same)));
    }
    CHECK(guard->read().norm == same->read().norm);
    for (size_t i = 0; i < plain.size(); ++i) {
      CAPTURE(number, i);
      REQUIRE(same_bits(ranges[shared[i].unsafeGetTensorImpl()].values, plain[i].detach().view({-1})));
    }
  }
}

}  // namespace

TEST_CASE("on a GPU, parts are updated as whole parameters, to the bit", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    CAPTURE(dtype);
    compare<FusedAdamW>(dtype, FusedAdamWOptions(0.01).weight_decay(0.1));
    compare<FusedLamb>(dtype, FusedLambOptions(0.01).weight_decay(0.1));
  }
}

// A node of one rank, which freezes behind its second step.
TEST_CASE("on a GPU, parts of 1-bit optimizers are updated as whole parameters, to the bit",
          "[gpu][shards][onebit_adam][onebit_lamb]") {
  PACER_NEEDS_GPU();
  const CapturedStderr quiet;  // so early a freeze is warned of
  const auto with = [](auto options) {
    return options.weight_decay(0.1).freeze_step(2).hierarchical(true).compress_alone(true);
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    CAPTURE(dtype);
    compare<OneBitAdam>(dtype, with(OneBitAdamOptions(0.01)).refresh_variance_every(3), 4);
    compare<OneBitLamb>(dtype, with(OneBitLambOptions(0.01)), 4);
  }
}

}  // namespace pacer::testing::shared_optimizers_gpu
