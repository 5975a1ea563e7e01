// Regions on a GPU that keep results of attention and products: gradients and random state of plain training to the bit.
#include "support/catch.h"

#include <functional>
#include <vector>

#include <ATen/ops/native_dropout.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <pacer/modules/detail/operator_list.h>
#include <pacer/modules/transformer_layer.h>

#include "support/both_devices.h"
#include "support/modules/gpu_blocks.h"

namespace pacer::testing::gpu_blocks {
namespace {

using Layer = modules::TransformerLayer;
using LayerOptions = modules::TransformerLayerOptions;

// The result, gradients, and the GPU's random state behind them.
std::vector<Tensor> outcome_of(Layer& layer, const std::function<Tensor(const Tensor&)>& f,
                               at::ScalarType dtype) {
  layer->zero_grad();
  torch::manual_seed(5);
  const auto options = at::TensorOptions().device(kGpu).dtype(dtype);
  const Tensor x = torch::randn({2, 64, 128}, options).requires_grad_();
  const Tensor y = f(x);
  (y.to(at::kFloat) * torch::arange(128, at::TensorOptions(kGpu)).cos()).sum().backward();
  std::vector<Tensor> outcome = {y.detach(), x.grad()};
  for (const Tensor& parameter : layer->parameters()) outcome.push_back(parameter.grad());
  outcome.push_back(gpu_random_state());
  return outcome;
}

}  // namespace

TEST_CASE("on a GPU, a region that keeps results gives what plain training gives, to the bit",
          "[gpu][recompute][kept]") {
  PACER_NEEDS_GPU();
  const auto plain_options = LayerOptions(128, 2).ffn(256).causal(true);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const LayerOptions& options :
         {LayerOptions(plain_options), LayerOptions(plain_options).rotary(10'000),
          LayerOptions(plain_options).attention_dropout(0.2).mlp_dropout(0.1)}) {
      CAPTURE(dtype, options.rotary().has_value(), options.attention_dropout());
      torch::manual_seed(1);
      Layer layer(options);
      layer->to(kGpu, dtype);
      const auto run = [&](const Tensor& x) {  // attention draws before dropout does
        return std::get<0>(at::native_dropout(layer(layer(x)), 0.25, true));
      };
      const auto wanted = outcome_of(layer, run, dtype);
      REQUIRE(same_bits(wanted, outcome_of(layer, run, dtype)));  // or nothing could be compared with it
      for (const KeptOperators& kept : {KeptOperators::attention(), KeptOperators::products(),
                                        KeptOperators{"aten::native_dropout", "aten::gelu"}}) {
        CAPTURE(kept.names());
        const auto again = [&](const Tensor& x) { return recompute(*layer, kept, run, x); };
        CHECK(same_bits(wanted, outcome_of(layer, again, dtype)));
        CHECK(kept.list()->kept > 0);
      }
    }
  }
}

// The kernel for fp32 gives its log-sum-exp only where a gradient is asked for, which the first run does not.
TEST_CASE("on a GPU, kept attention has what its backward needs", "[gpu][recompute][kept]") {
  PACER_NEEDS_GPU();
  torch::nn::Linear module(32, 32);
  module->to(kGpu);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    CAPTURE(dtype);
    const auto f = [&](const Tensor& x) {
      const Tensor heads = module(x).to(dtype).view({2, 48, 2, 16}).transpose(1, 2);
      return at::scaled_dot_product_attention(heads, heads * 2, heads.sin());
    };
    const auto gradient = [&](const std::function<Tensor(const Tensor&)>& run) {
      module->zero_grad();
      torch::manual_seed(3);
      const Tensor x = torch::randn({2, 48, 32}, kGpu);
      run(x).to(at::kFloat).square().sum().backward();
      return module->weight.grad();
    };
    const KeptOperators kept = KeptOperators::attention();
    const Tensor wanted = gradient(f);
    CHECK(gradient([&](const Tensor& x) { return recompute(*module, kept, f, x); }).equal(wanted));
    CHECK(kept.list()->kept == 1);
  }
}

}  // namespace pacer::testing::gpu_blocks
