// Adapters that train the rows of a weight as directions and lengths (DoRA): results and gradients beside
// LibTorch's own operations in fp64, merging, and what is refused.
#include "support/catch.h"

#include <cmath>

#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>

#include <pacer/core/error.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"

namespace pacer::testing::lora_dora {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using torch::Tensor;

LoraOptions dora(int64_t r = 3) { return LoraOptions(r).alpha(6).dora(true); }

void fill(const modules::LoraAdapter& adapter) {
  const torch::NoGradGuard no_grad;
  adapter->A.normal_(0, 0.3);
  adapter->B.normal_(0, 0.3);
  adapter->magnitude.mul_(torch::rand_like(adapter->magnitude) + 0.5);
}

modules::Linear adapted(int64_t in, int64_t out, bool bias = true) {
  modules::Linear layer(torch::nn::LinearOptions(in, out).bias(bias));
  layer->add_adapter(dora());
  fill(layer->adapter("default"));
  return layer;
}

// Equation 5 of the paper in fp64, with the length as a constant.
Tensor reference(const modules::Linear& layer, const Tensor& weight, const Tensor& x) {
  const modules::LoraAdapter adapter = layer->adapter("default");
  const auto wide = [](const Tensor& tensor) { return tensor.to(at::kDouble); };
  const Tensor v = wide(weight) + 2 * wide(adapter->B).matmul(wide(adapter->A));
  const Tensor lengths = v.square().sum(1).sqrt().detach();
  const Tensor rows = (wide(adapter->magnitude) / lengths).unsqueeze(1) * v;
  const Tensor y = wide(x).matmul(rows.t());
  return layer->bias.defined() ? y + wide(layer->bias) : y;
}

}  // namespace

TEST_CASE("a new adapter with DoRA changes nothing, and trains the lengths of the rows, too", "[lora]") {
  torch::manual_seed(2);
  modules::Linear layer(12, 8);
  torch::nn::ModuleList model(layer);
  const Tensor x = torch::randn({4, 12}), before = layer(x);
  modules::add_lora(*model, dora().targets({"0"}));
  CHECK(modules::trainable(*model).keys() ==
        std::vector<std::string>{"0.lora_default.A", "0.lora_default.B", "0.lora_default.magnitude"});
  const Tensor magnitude = layer->adapter("default")->magnitude;
  CHECK(torch::allclose(magnitude, layer->weight.square().sum(1).sqrt()));
  CHECK(torch::allclose(layer(x), before, 1e-5, 1e-6));
}

TEST_CASE("results and gradients of DoRA are those of LibTorch's operations in fp64", "[lora]") {
  for (const bool bias : {true, false}) {
    torch::manual_seed(3);
    modules::Linear layer = adapted(12, 8, bias), plain(12, 6);
    layer->to(at::kDouble);
    plain->to(at::kDouble);
    const Tensor x = torch::randn({2, 7, 12}, at::kDouble).requires_grad_();
    const Tensor twin = x.detach().clone().requires_grad_();
    const auto together = modules::forward_together(x, {plain, layer});
    CHECK(together[0].allclose(plain(x)));
    const Tensor y = bias ? layer(x) : together[1], wanted = reference(layer, layer->weight, twin);
    CHECK((y - wanted).abs().max().item<double>() < 1e-12);
    const Tensor direction = torch::randn_like(wanted);
    std::vector<Tensor> inputs = {x}, twins = {twin};
    for (const Tensor& parameter : layer->parameters()) {
      inputs.push_back(parameter);
      twins.push_back(parameter);
    }
    REQUIRE(inputs.size() == (bias ? 6 : 5));
    const auto found = torch::autograd::grad({(y * direction).sum()}, inputs);
    const auto expected = torch::autograd::grad({(wanted * direction).sum()}, twins);
    for (size_t i = 0; i < found.size(); ++i) {
      CAPTURE(i);
      CHECK(expected[i].abs().max().item<double>() > 1e-3);
      CHECK((found[i] - expected[i]).abs().max().item<double>() < 1e-10);
    }
  }
}

TEST_CASE("DoRA over 4 bits and in 16 bits is that of the weight's values", "[lora][nf4]") {
  torch::manual_seed(5);
  modules::Linear layer(64, 8);
  torch::nn::ModuleList model(layer);
  modules::quantize(*model, modules::Nf4Options().targets({"0"}));
  modules::add_lora(*model, dora().targets({"0"}));
  const Tensor values = layer->nf4()->decode(at::kDouble), x = torch::randn({5, 64});
  const modules::LoraAdapter adapter = layer->adapter("default");
  CHECK(torch::allclose(adapter->magnitude.to(at::kDouble), values.square().sum(1).sqrt(), 1e-5));
  fill(adapter);
  const Tensor wanted = reference(layer, values, x);
  CHECK((layer(x).to(at::kDouble) - wanted).abs().max().item<double>() < 1e-4);
  const Autocast autocast(at::kCPU);
  const Tensor y = layer(x);
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK((y.to(at::kDouble) - wanted).norm().item<double>() < 0.02 * wanted.norm().item<double>());
  y.sum().backward();
  CHECK(adapter->magnitude.grad().scalar_type() == at::kFloat);
}

TEST_CASE("in 8-bit floats DoRA scales products of 8 bits", "[lora][fp8]") {
  torch::manual_seed(9);
  modules::Linear layer = adapted(64, 32);
  torch::nn::ModuleList model(layer);
  const Tensor x = torch::randn({16, 64});
  const Tensor wanted = reference(layer, layer->weight, x);
  const auto scaling = std::make_shared<Fp8Scaling>(*model, Fp8Options().recipe(Fp8Recipe::current));
  const Fp8Scope scope(scaling);
  const Tensor y = layer(x);
  CHECK(y.scalar_type() == at::kBFloat16);
  const double error = (y.to(at::kDouble) - wanted).norm().item<double>() / wanted.norm().item<double>();
  CHECK(error < 0.06);  // 3 bits of mantissa in both factors
  CHECK(error > 0.01);  // more than 16 bits lose
}

TEST_CASE("dropout with DoRA drops parts of what A takes", "[lora]") {
  torch::manual_seed(6);
  modules::Linear layer(12, 8);
  layer->add_adapter(dora().dropout(0.5));
  const modules::LoraAdapter adapter = layer->adapter("default");
  fill(adapter);
  const Tensor x = torch::eye(12);  // a row tells which element was dropped
  const Tensor full = (layer->eval(), layer(x));
  CHECK(torch::allclose(full.to(at::kDouble), reference(layer, layer->weight, x), 1e-4, 1e-5));
  layer->train();
  const Tensor dropped = layer(x);
  const Tensor factors = adapter->row_factors(layer->weight);
  const Tensor base = layer->weight.t() * factors + layer->bias, added = full - base;
  int64_t kept = 0;
  for (int64_t row = 0; row < 12; ++row) {
    const bool is_kept = torch::allclose(dropped[row], base[row] + 2 * added[row], 1e-4, 1e-5);
    kept += is_kept ? 1 : 0;
    CHECK((is_kept || torch::allclose(dropped[row], base[row], 1e-4, 1e-5)));
  }
  CHECK(kept > 0);
  CHECK(kept < 12);
}

TEST_CASE("merged rows have the lengths that DoRA trained, and unmerge brings back every byte", "[lora]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    torch::manual_seed(7);
    modules::Linear layer = adapted(12, 8);
    layer->weight.set_data(layer->weight.to(dtype));
    layer->bias.set_data(layer->bias.to(dtype));
    torch::nn::ModuleList model(layer);
    const Tensor x = torch::randn({5, 12}).to(dtype), before = layer->weight.detach().clone();
    const Tensor beside = layer(x), wanted = reference(layer, before, x);
    const double close = dtype == at::kDouble ? 1e-6 : 0.02;
    modules::merge(*model);
    CHECK((layer(x).to(at::kDouble) - wanted).norm().item<double>() < close * wanted.norm().item<double>());
    const Tensor lengths = layer->weight.to(at::kDouble).square().sum(1).sqrt();
    CHECK(torch::allclose(lengths, layer->adapter("default")->magnitude.to(at::kDouble), close));
    modules::unmerge(*model);
    CHECK(layer->weight.equal(before));
    CHECK(layer(x).equal(beside));
  }
}

TEST_CASE("a row of zeros has no direction and stays one of zeros", "[lora]") {
  modules::Linear layer(8, 4);
  {
    const torch::NoGradGuard no_grad;
    layer->weight[2].zero_();
  }
  layer->add_adapter(dora());
  const Tensor x = torch::randn({3, 8}).requires_grad_(), y = layer(x);
  CHECK(torch::allclose(y, at::linear(x, layer->weight, layer->bias), 1e-5, 1e-6));
  y.square().sum().backward();
  for (const Tensor& parameter : layer->parameters()) {
    if (parameter.requires_grad()) CHECK(torch::isfinite(parameter.grad()).all().item<bool>());
  }
  layer->merge();
  CHECK(layer->weight[2].count_nonzero().item<int64_t>() == 0);
}

TEST_CASE("a Session trains DoRA, and a clone has it", "[lora][session]") {
  torch::manual_seed(8);
  modules::Linear layer(8, 8), twin(8, 8);
  torch::nn::ModuleList model(layer);
  modules::add_lora(*model, dora(2).targets({"0"}));
  const Tensor weight = layer->weight.detach().clone(), x = torch::randn({32, 8});
  FusedAdamW optimizer(modules::trainable(*model), FusedAdamWOptions(0.02).weight_decay(0));
  Session session(*model, optimizer);
  double first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    auto [in] = session.begin(x);
    const Tensor loss = torch::mse_loss(layer(in), 2 * at::linear(in, weight, layer->bias));
    session.backward(loss);
    session.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  session.finish();
  CHECK(last < 0.2 * first);
  CHECK(layer->weight.equal(weight));
  const auto copy = std::dynamic_pointer_cast<modules::LinearImpl>(layer->clone());
  CHECK(copy->forward(x).equal(layer(x)));
  CHECK(copy->adapter("default")->magnitude.requires_grad());
  CHECK_FALSE(copy->adapter("default")->magnitude.is_same(layer->adapter("default")->magnitude));
}

TEST_CASE("what DoRA does not go with is refused by name, and nothing has changed", "[lora]") {
  modules::Linear layer(8, 8);
  torch::nn::ModuleList model;
  model->push_back(layer);
  model->push_back(modules::Conv1d(4, 4, 3));
  model->push_back(modules::Embedding(4, 4));
  for (const char* target : {"1", "2"}) {
    CHECK_THAT(
        message_of<InvalidArgument>([&] {
          modules::add_lora(*model, dora().targets({"0", target}));
        }),
        ContainsSubstring(std::string("add_lora: ") + target + " takes no adapter with LoraOptions::dora"));
    CHECK(modules::adapters(*model).empty());
    CHECK(layer->weight.requires_grad());
  }
  modules::add_lora(*model, dora().targets({"0"}).name("a"));
  modules::add_lora(*model, LoraOptions(2).targets({"0", "1"}).name("b"));
  CHECK_THAT(message_of<InvalidArgument>([&] {
               modules::set_adapters(*model, {"a", "b"});
             }),
             ContainsSubstring("set_adapters: 0 has an adapter with LoraOptions::dora, a, which"));
  CHECK(layer->active_adapters().size() == 1);
  CHECK(layer->adapter("b")->A.requires_grad());
  CHECK_FALSE(layer->adapter("a")->magnitude.requires_grad());
  CHECK_THROWS_WITH(layer->set_active_adapters({"b", "a"}),
                    ContainsSubstring("the layer has an adapter with"));
  modules::set_adapters(*model, {"a"});
  CHECK(layer->adapter("a")->magnitude.requires_grad());
}

}  // namespace pacer::testing::lora_dora
