// LayerNormLinear, LayerNormMlp and TransformerLayer on a GPU beside fp64 and beside the CPU, with the
// elements that the CPU drops, and without waiting.
#include "support/catch.h"

#include <memory>
#include <optional>
#include <vector>

#include <pacer/modules/fp8_scaling.h>

#include "support/both_devices.h"
#include "support/kernels/fused_reference.h"
#include "support/modules/autocast.h"
#include "support/no_waiting.h"

namespace pacer::testing::fused_layers {
namespace {

const at::Device kGpu(at::kCUDA, 0);

Pass to_cpu(Pass pass) {
  pass.y = pass.y.detach().cpu();
  pass.dx = pass.dx.cpu();
  for (auto& [name, gradient] : pass.gradients) gradient = gradient.cpu();
  return pass;
}

// On one device, with the seed of what is dropped.
template <class Module>
Pass pass_on(at::Device device, Module& module, at::ScalarType dtype, const Tensor& x, const Tensor& dy,
             bool in_8_bits) {
  module.to(device, dtype);
  const auto scaling = in_8_bits ? std::make_shared<Fp8Scaling>(module) : nullptr;
  torch::manual_seed(3);
  const Fp8Scope scope(scaling);
  return to_cpu(fused_pass(module, x.to(device, dtype), dy.to(device)));
}

// With parameters and a residual stream of 32 bits.
template <class Module>
Pass autocast_pass_on(at::Device device, Module& module, const Tensor& x, const Tensor& dy) {
  module.to(device, at::kFloat);
  const Autocast on(device.type());
  return to_cpu(fused_pass(module, x.to(device), dy.to(device)));
}

}  // namespace

TEST_CASE("on a GPU fused layers are as exact as on the CPU", "[gpu][fused]") {
  PACER_NEEDS_GPU();
  for_all_layers([](auto layer) {
    randomize(*layer);
    const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
    const Pass exact = reference_pass(*layer, x, dy);
    CHECK(largest_error(pass_on(kGpu, *layer, at::kFloat, x, dy, false), exact) < 1e-5);
    const Pass on_cpu = autocast_pass_on(at::kCPU, *layer, x, dy),
               on_gpu = autocast_pass_on(kGpu, *layer, x, dy);
    CHECK(largest_error(on_gpu, exact) <= 1.2 * largest_error(on_cpu, exact));
    for (const bool in_8_bits : {false, true}) {
      CAPTURE(layer->name(), in_8_bits);
      const Pass cpu = pass_on(at::kCPU, *layer, at::kBFloat16, x, dy, in_8_bits);
      const Pass gpu = pass_on(kGpu, *layer, at::kBFloat16, x, dy, in_8_bits);
      CHECK(relative_error(gpu.y, exact.y) <= 1.1 * relative_error(cpu.y, exact.y));
      CHECK(largest_error(gpu, exact) <= 1.2 * largest_error(cpu, exact));
    }
    layer->to(at::kCPU, at::kFloat);
  });
}

TEST_CASE("on a GPU fused layers drop what they drop on the CPU", "[gpu][fused][dropout]") {
  PACER_NEEDS_GPU();
  for (const bool in_8_bits : {false, true}) {
    modules::TransformerLayer layer(
        modules::TransformerLayerOptions(32, 4).ffn(64).projection_dropout(0.3).mlp_dropout(0.3));
    randomize(*layer);
    const Tensor x = batch(), dy = torch::randn_like(x);
    const Pass cpu = pass_on(at::kCPU, *layer, at::kBFloat16, x, dy, in_8_bits);
    const Pass gpu = pass_on(kGpu, *layer, at::kBFloat16, x, dy, in_8_bits);
    // Another mask would make it about 0.6.
    CHECK(largest_error(gpu, cpu) <= (in_8_bits ? 0.15 : 0.03));
  }
}

TEST_CASE("a fused layer never waits for the GPU", "[gpu][fused]") {
  PACER_NEEDS_GPU();
  std::vector<modules::TransformerLayerOptions> all = language_model_layers();
  all.push_back(modules::TransformerLayerOptions(32, 4).dropout(0.1));
  for (const modules::TransformerLayerOptions& options : all) {
    modules::TransformerLayer layer(options);
    layer->to(kGpu, at::kBFloat16);
    const Tensor x = torch::randn({2, 32, 32}, at::TensorOptions().device(kGpu).dtype(at::kBFloat16));
    const auto scaling = std::make_shared<Fp8Scaling>(*layer);
    const auto step = [&] {
      const Fp8Scope scope(scaling);
      layer(x).sum().backward();
      scaling->update();
    };
    step();
    const NoWaiting no_waiting;
    for (int i = 0; i < 100; ++i) step();
  }
}

TEST_CASE("on a GPU layers of language models take masks and windows over shared heads",
          "[gpu][fused][language_model]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (modules::TransformerLayerOptions options : language_model_layers()) {
      AttentionWindow window(WindowForm::sliding);
      window.set_length(5);
      modules::TransformerLayer layer(options.window(window));
      randomize(*layer);
      const Tensor x = batch();
      const Tensor positions = torch::arange(16), apart = positions.unsqueeze(1) - positions.unsqueeze(0);
      const Tensor mask = apart.ge(0).logical_and(apart.lt(5));  // what the window leaves
      layer->options.causal(false).window(std::nullopt);
      const Tensor exact = reference(*layer, x.to(at::kDouble), {}, mask);
      const double bound = dtype == at::kFloat ? 1e-5 : 0.03;
      layer->to(kGpu, dtype);
      const Tensor on_gpu = x.to(kGpu, dtype);
      CHECK(relative_error(layer(on_gpu, mask.to(kGpu)).cpu(), exact) < bound);
      layer->options.causal(true).window(window);
      CHECK(relative_error(layer(on_gpu).cpu(), exact) < bound);
    }
  }
}

TEST_CASE("on a GPU fused layers say what sizes they cannot have", "[gpu][fused][errors]") {
  PACER_NEEDS_GPU();
  modules::LayerNormLinear odd(12, 8);
  odd->to(kGpu);
  CHECK_THROWS_WITH(odd(torch::zeros({4, 12}, kGpu)), Catch::Matchers::ContainsSubstring("multiple of 8"));
  modules::LayerNormMlp empty(16, 32);
  empty->to(kGpu);
  const Tensor y = empty(torch::zeros({0, 16}, kGpu).requires_grad_());
  y.sum().backward();
  for (const Tensor& parameter : empty->parameters()) {
    CHECK(parameter.grad().equal(torch::zeros_like(parameter)));
  }
}

}  // namespace pacer::testing::fused_layers
