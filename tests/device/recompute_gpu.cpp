// Regions recomputed on a GPU: gradients and random state of plain training to the bit, and what an exception
// in the second run leaves behind.
#include "support/catch.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/nn/modules/container/sequential.h>

#include "support/both_devices.h"
#include "support/modules/autocast.h"
#include "support/modules/gpu_blocks.h"

namespace pacer::testing::gpu_blocks {
namespace {

// Parameters and inputs of `dtype`, and whether forward runs under autocast to bf16.
struct Numbers {
  at::ScalarType dtype;
  bool autocast;
};

using Forward = std::function<Tensor(const Tensor&)>;

// What forward and backward give: the result, the gradients of x and of all parameters, and the GPU's random
// state behind them.
std::vector<Tensor> pass(torch::nn::Module& module, const Forward& f, const Numbers& numbers) {
  module.zero_grad();
  torch::manual_seed(5);
  const Tensor before = gpu_random_state();
  const auto options = at::TensorOptions().device(kGpu).dtype(numbers.dtype);
  const Tensor x = torch::randn({3, 40, kSize}, options).requires_grad_();
  const Tensor weight = torch::randn({3, 40, kSize}, options.dtype(at::kFloat));
  Tensor y;
  {
    const auto cast = numbers.autocast ? std::make_unique<Autocast>(at::kCUDA) : nullptr;
    y = f(x);
  }
  (y.to(at::kFloat) * weight).sum().backward();
  std::vector<Tensor> outcome = {y.detach(), x.grad()};
  for (const Tensor& parameter : module.parameters()) outcome.push_back(parameter.grad());
  outcome.push_back(gpu_random_state());
  REQUIRE_FALSE(outcome.back().equal(before));
  return outcome;
}

}  // namespace

TEST_CASE("on a GPU, a recomputed region gives what plain training gives, to the bit", "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  for (const Numbers& numbers : {Numbers{at::kFloat, false}, {at::kFloat, true}, {at::kBFloat16, false}}) {
    CAPTURE(numbers.dtype, numbers.autocast);
    torch::manual_seed(1);
    Mlp a, b;
    torch::nn::Sequential both(a, b);
    both->to(kGpu, numbers.dtype);
    const auto f = &MlpImpl::forward;
    const Forward plain = [&](const Tensor& x) { return b(a(x)); };
    const Forward in_row = [&](const Tensor& x) { return recompute(*b, f, recompute(*a, f, x)); };
    const Forward nested = [&](const Tensor& x) { return recompute(*both, in_row, x); };
    const auto wanted = pass(*both, plain, numbers);
    REQUIRE(same_bits(wanted, pass(*both, plain, numbers)));  // or nothing could be compared with it
    CHECK(same_bits(wanted, pass(*both, in_row, numbers)));
    CHECK(same_bits(wanted, pass(*both, nested, numbers)));
  }
}

TEST_CASE("on a GPU, an exception in the second run puts random state and autocast back",
          "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(1);
  Mlp module;
  module->to(kGpu);
  int runs = 0;
  const auto fails = [&](const Tensor& x) {
    const Tensor y = module(x);
    if (++runs == 2) throw std::runtime_error("the second run fails");
    return y;
  };
  Tensor y;
  {
    const Autocast autocast(at::kCUDA);
    y = recompute(*module, fails, torch::randn({4, kSize}, kGpu).requires_grad_());
  }
  torch::rand({7}, kGpu);  // what is put back is the state of now, not that of the first run
  const auto before = detail::get_random_state(kGpu);
  CHECK_THROWS_WITH(y.sum().backward(), Catch::Matchers::ContainsSubstring("the second run fails"));
  const auto after = detail::get_random_state(kGpu);
  CHECK(after.cuda.equal(before.cuda));
  CHECK(after.cpu.equal(before.cpu));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
  CHECK_FALSE(module->up->weight.grad().defined());
  // The thread in which backward runs on the GPU is as it was, too.
  const Numbers numbers{at::kFloat, false};
  const auto wanted = pass(
      *module, [&](const Tensor& x) { return module(x); }, numbers);
  const auto f = &MlpImpl::forward;
  CHECK(same_bits(wanted, pass(
                              *module, [&](const Tensor& x) { return recompute(*module, f, x); }, numbers)));
}

}  // namespace pacer::testing::gpu_blocks
