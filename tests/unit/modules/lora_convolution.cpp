// Convolutions that take adapters: LibTorch's to the bit without one; with one, results and gradients beside
// LibTorch's own operations in fp64, merging, and what is refused.
#include "support/catch.h"

#include <cmath>

#include <torch/autograd.h>
#include <torch/nn/functional/padding.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>

#include <pacer/core/error.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"

namespace pacer::testing::lora_convolution {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using torch::Tensor;
using Options1d = torch::nn::Conv1dOptions;
using Options2d = torch::nn::Conv2dOptions;
using Options3d = torch::nn::Conv3dOptions;

constexpr int64_t kNone = 0;  // padding, where a bare 0 could be a word

template <class Ours, class Theirs, class Options>
void check_twin(const Options& options, const Tensor& x) {
  torch::manual_seed(4);
  Theirs wanted(options);
  torch::manual_seed(4);
  Ours layer(options);
  const auto own = layer->named_parameters(), its = wanted->named_parameters();
  REQUIRE(own.keys() == its.keys());
  for (const auto& item : its) CHECK(own[item.key()].equal(item.value()));
  const Tensor y = layer(x), twin = wanted(x);
  CHECK(y.equal(twin));
  y.square().sum().backward();
  twin.square().sum().backward();
  for (const auto& item : its) CHECK(own[item.key()].grad().equal(item.value().grad()));
}

void fill(const modules::LoraAdapter& adapter) {
  const torch::NoGradGuard no_grad;
  adapter->A.normal_(0, 0.3);
  adapter->B.normal_(0, 0.3);
}

// A layer in fp64 with an adapter of random matrices that is trained with weight and bias.
template <class Layer, class Options>
Layer adapted(const Options& options, const LoraOptions& lora) {
  Layer layer(options);
  layer->add_adapter(lora);
  fill(layer->adapters().front());
  layer->to(at::kDouble);
  return layer;
}

// Results and gradients are those of `rule`.
template <class Layer, class Rule>
void check_against(Layer& layer, const Tensor& x, const Rule& rule) {
  const Tensor twin = x.detach().clone().requires_grad_();
  const Tensor y = layer(x), wanted = rule(twin);
  REQUIRE(y.sizes() == wanted.sizes());
  CHECK((y - wanted).abs().max().template item<double>() < 1e-12);
  const Tensor direction = torch::randn_like(wanted);
  std::vector<Tensor> inputs = {x}, twins = {twin};
  for (const Tensor& parameter : layer->parameters()) {
    inputs.push_back(parameter);
    twins.push_back(parameter);
  }
  const auto found = torch::autograd::grad({(y * direction).sum()}, inputs);
  const auto expected = torch::autograd::grad({(wanted * direction).sum()}, twins);
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(expected[i].abs().max().template item<double>() > 1e-3);
    CHECK((found[i] - expected[i]).abs().max().template item<double>() < 1e-10);
  }
}

Tensor random_input(at::IntArrayRef sizes) { return torch::randn(sizes, at::kDouble).requires_grad_(); }

}  // namespace

TEST_CASE("convolutions without adapters are LibTorch's to the bit", "[lora]") {
  torch::manual_seed(1);
  const Tensor x1 = torch::randn({3, 4, 11}), x2 = torch::randn({3, 4, 9, 8}),
               x3 = torch::randn({2, 4, 5, 6, 4});
  check_twin<modules::Conv1d, torch::nn::Conv1d>(Options1d(4, 6, 3).stride(2).padding(1), x1);
  check_twin<modules::Conv1d, torch::nn::Conv1d>(Options1d(4, 6, 3).padding(torch::kSame), x1);
  check_twin<modules::Conv2d, torch::nn::Conv2d>(Options2d(4, 6, {3, 2}).stride({2, 1}).dilation(2), x2);
  check_twin<modules::Conv2d, torch::nn::Conv2d>(Options2d(4, 6, 3).groups(2).bias(false), x2);
  check_twin<modules::Conv2d, torch::nn::Conv2d>(Options2d(4, 6, 3).padding(torch::kValid), x2);
  const std::vector<Options2d::padding_mode_t> modes = {torch::kReflect, torch::kReplicate, torch::kCircular};
  for (const auto& mode : modes) {
    check_twin<modules::Conv2d, torch::nn::Conv2d>(Options2d(4, 6, 3).padding({2, 1}).padding_mode(mode), x2);
  }
  check_twin<modules::Conv3d, torch::nn::Conv3d>(Options3d(4, 6, {2, 3, 1}).padding({1, 1, 0}), x3);
  check_twin<modules::Conv1d, torch::nn::Conv1d>(Options1d(4, 6, 3), x1[0]);
}

TEST_CASE("results and gradients of adapters of convolutions are those of LibTorch's in fp64", "[lora]") {
  torch::manual_seed(3);
  const LoraOptions lora = LoraOptions(4).alpha(6);  // the scale is 1.5
  SECTION("in one dimension") {
    auto layer = adapted<modules::Conv1d>(Options1d(4, 6, 3).stride(2).padding(1), lora);
    const modules::LoraAdapter adapter = layer->adapter("default");
    REQUIRE(adapter->A.sizes() == at::IntArrayRef({4, 4, 3}));
    REQUIRE(adapter->B.sizes() == at::IntArrayRef({6, 4, 1}));
    check_against(layer, random_input({3, 4, 11}), [&](const Tensor& x) {
      return torch::conv1d(x, layer->weight, layer->bias, 2, 1) +
             1.5 * torch::conv1d(torch::conv1d(x, adapter->A, {}, 2, 1), adapter->B);
    });
  }
  SECTION("in two, with dilation and groups") {
    auto layer = adapted<modules::Conv2d>(Options2d(4, 6, {3, 2}).stride({1, 2}).dilation(2).groups(2), lora);
    const modules::LoraAdapter adapter = layer->adapter("default");
    REQUIRE(adapter->A.sizes() == at::IntArrayRef({4, 4, 3, 2}));
    REQUIRE(adapter->B.sizes() == at::IntArrayRef({6, 2, 1, 1}));
    check_against(layer, random_input({2, 4, 9, 8}), [&](const Tensor& x) {
      const Tensor low = torch::conv2d(x, adapter->A, {}, {1, 2}, at::IntArrayRef(kNone), 2);
      return torch::conv2d(x, layer->weight, layer->bias, {1, 2}, at::IntArrayRef(kNone), 2, 2) +
             1.5 * torch::conv2d(low, adapter->B, {}, 1, at::IntArrayRef(kNone), 1, 2);
    });
  }
  SECTION("in two, with padding by reflection") {
    auto layer =
        adapted<modules::Conv2d>(Options2d(4, 6, 3).padding({2, 1}).padding_mode(torch::kReflect), lora);
    const modules::LoraAdapter adapter = layer->adapter("default");
    check_against(layer, random_input({2, 4, 5, 6}), [&](const Tensor& x) {
      const Tensor padded = torch::nn::functional::pad(
          x, torch::nn::functional::PadFuncOptions({1, 1, 2, 2}).mode(torch::kReflect));
      return torch::conv2d(padded, layer->weight, layer->bias) +
             1.5 * torch::conv2d(torch::conv2d(padded, adapter->A), adapter->B);
    });
  }
  SECTION("in three, with padding to the same size") {
    auto layer = adapted<modules::Conv3d>(Options3d(4, 6, {2, 3, 1}).padding(torch::kSame), lora);
    const modules::LoraAdapter adapter = layer->adapter("default");
    REQUIRE(adapter->A.sizes() == at::IntArrayRef({4, 4, 2, 3, 1}));
    REQUIRE(adapter->B.sizes() == at::IntArrayRef({6, 4, 1, 1, 1}));
    check_against(layer, random_input({2, 4, 3, 4, 3}), [&](const Tensor& x) {
      const auto same = [](const Tensor& in, const Tensor& weight, const Tensor& bias = {}) {
        return torch::conv3d(in, weight, bias, 1, "same");
      };
      return same(x, layer->weight, layer->bias) + 1.5 * same(same(x, adapter->A), adapter->B);
    });
  }
}

TEST_CASE("a new adapter of a convolution begins as PEFT's and changes nothing", "[lora]") {
  torch::manual_seed(2);
  modules::Conv2d layer(3, 8, 3);
  torch::nn::ModuleList model(layer);
  const Tensor x = torch::randn({2, 3, 6, 6}), before = layer(x);
  CHECK(modules::add_lora(*model, LoraOptions(64).targets({"0"})) == std::vector<std::string>{"0"});
  CHECK(layer(x).equal(before));
  CHECK(modules::trainable(*model).keys() ==
        std::vector<std::string>{"0.lora_default.A", "0.lora_default.B"});
  const Tensor a = layer->adapter("default")->A;
  const double bound = 1 / std::sqrt(27.0);  // in_channels times the size of the kernel
  CHECK(a.abs().max().item<double>() <= bound);
  CHECK(a.abs().max().item<double>() > 0.98 * bound);
  CHECK(std::abs(a.mean().item<double>()) < 0.1 * bound);
}

TEST_CASE("dropout of a convolution's adapter drops parts of what A takes, in train() only", "[lora]") {
  torch::manual_seed(3);
  auto layer = adapted<modules::Conv1d>(Options1d(2, 3, 3), LoraOptions(2).dropout(0.5));
  const modules::LoraAdapter adapter = layer->adapter("default");
  const Tensor x = torch::randn({2, 2, 7}, at::kDouble);
  const auto rule = [&](const Tensor& dropped) {
    return torch::conv1d(x, layer->weight, layer->bias) +
           torch::conv1d(torch::conv1d(dropped, adapter->A), adapter->B);
  };
  torch::manual_seed(11);
  const Tensor y = layer(x);
  CHECK_FALSE(torch::allclose(y, rule(x)));
  torch::manual_seed(11);
  CHECK(torch::allclose(y, rule(torch::dropout(x, 0.5, true))));
  layer->eval();
  CHECK(torch::allclose(layer(x), rule(x), 1e-12, 1e-12));
}

TEST_CASE("in 16 bits and under autocast a convolution with an adapter computes in that dtype", "[lora]") {
  torch::manual_seed(5);
  auto layer = adapted<modules::Conv2d>(Options2d(4, 6, 3), LoraOptions(2));
  const Tensor x = torch::randn({2, 4, 6, 6});
  const Tensor wanted = layer(x.to(at::kDouble));
  const auto is_near = [&](const Tensor& y) {
    CHECK(y.scalar_type() == at::kBFloat16);
    CHECK((y.to(at::kDouble) - wanted).norm().item<double>() < 0.02 * wanted.norm().item<double>());
  };
  layer->to(at::kFloat);
  {
    const Autocast autocast(at::kCPU);
    const Tensor y = layer(x);
    is_near(y);
    y.sum().backward();
  }
  CHECK(layer->adapter("default")->A.grad().scalar_type() == at::kFloat);
  layer->weight.set_data(layer->weight.to(at::kBFloat16));  // fp32 adapters beside a model in 16 bits
  layer->bias.set_data(layer->bias.to(at::kBFloat16));
  is_near(layer(x.to(at::kBFloat16)));
}

TEST_CASE("merged convolutions compute what adapters added, and unmerge brings back every byte", "[lora]") {
  const auto check = [](auto layer, const Tensor& x, const char* product) {
    const modules::LoraAdapter adapter = layer->adapter("default");
    const Tensor before = layer->weight.detach().clone(), beside = layer(x);
    const Tensor sum =
        before + adapter->scale() * torch::einsum(product, {adapter->B.flatten(1), adapter->A});
    torch::nn::ModuleList model(layer);
    modules::merge(*model);
    CHECK((layer->weight - sum).abs().max().template item<double>() < 1e-12);
    CHECK((layer(x) - beside).abs().max().template item<double>() < 1e-12);
    const auto copy = layer->clone();
    const auto& twin = dynamic_cast<const std::decay_t<decltype(*layer)>&>(*copy);
    CHECK(twin.is_merged());
    CHECK(twin.is_unmergeable());
    modules::unmerge(*model);
    CHECK(layer->weight.equal(before));
    CHECK(layer(x).equal(beside));
  };
  torch::manual_seed(7);
  const LoraOptions lora = LoraOptions(3).alpha(2);
  check(adapted<modules::Conv1d>(Options1d(4, 6, 3).padding(1), lora), random_input({2, 4, 7}),
        "or,rck->ock");
  check(adapted<modules::Conv2d>(
            Options2d(4, 6, {3, 2}).dilation(2).padding(1).padding_mode(torch::kCircular), lora),
        random_input({2, 4, 7, 8}), "or,rchw->ochw");
  check(adapted<modules::Conv3d>(Options3d(4, 6, {2, 3, 1}).stride(2), lora), random_input({2, 4, 4, 5, 3}),
        "or,rcdhw->ocdhw");
}

TEST_CASE("a clone of a convolution has its adapters, and what is frozen stays frozen", "[lora]") {
  auto layer = adapted<modules::Conv2d>(Options2d(2, 4, 3), LoraOptions(2).name("a"));
  layer->weight.requires_grad_(false);
  layer->add_adapter(LoraOptions(2).name("b"));
  layer->to(at::kDouble);
  const auto copy = std::dynamic_pointer_cast<modules::Conv2dImpl>(layer->clone());
  CHECK_FALSE(copy->weight.requires_grad());
  CHECK(copy->bias.requires_grad());
  CHECK(modules::trainable(*copy).keys() == modules::trainable(*layer).keys());
  layer->set_active_adapters({"a"});
  copy->set_active_adapters({"a"});
  const Tensor x = random_input({1, 2, 5, 5});
  CHECK(copy->forward(x).equal(layer(x)));
  {
    const torch::NoGradGuard no_grad;
    copy->adapter("a")->B.zero_();
  }
  CHECK_FALSE(copy->forward(x).equal(layer(x)));
}

TEST_CASE("what a convolution cannot have is refused by name, and nothing has changed", "[lora]") {
  modules::Conv2d grouped(Options2d(4, 6, 3).groups(2)), plain(4, 4, 3);
  torch::nn::ModuleList model;
  model->push_back(plain);
  model->push_back(grouped);
  model->push_back(torch::nn::Conv2d(4, 4, 3));
  model->push_back(torch::nn::ConvTranspose2d(4, 4, 3));
  const auto refused = [&](const LoraOptions& lora, const char* reason) {
    CHECK_THAT(message_of<InvalidArgument>([&] { modules::add_lora(*model, lora); }),
               ContainsSubstring(reason));
    CHECK(modules::adapters(*model).empty());
    CHECK(plain->weight.requires_grad());
  };
  refused(LoraOptions(3).targets({"0", "1"}), "add_lora: 1 has 2 groups, of which the adapter's r, 3,");
  refused(LoraOptions(2).targets({"2"}),
          "2 is a torch::nn::Conv2d, build the model of pacer::modules::Conv2d");
  refused(LoraOptions(2).targets({"3"}),
          "matches no pacer::modules::Linear, Conv1d, Conv2d, Conv3d or Embedding");
  CHECK_THROWS_WITH(grouped->add_adapter(LoraOptions(3)), ContainsSubstring("the layer has 2 groups"));
  CHECK(grouped->adapters().empty());

  modules::add_lora(*model, LoraOptions(2).targets({"0", "1"}));
  const Tensor before = plain->weight.detach().clone();
  CHECK_THAT(message_of<InvalidArgument>([&] { modules::merge(*model); }),
             ContainsSubstring("the weight of 1 is that of a convolution with groups"));
  CHECK_FALSE(plain->is_merged());
  CHECK(plain->weight.equal(before));
  CHECK_THAT(
      message_of<InvalidArgument>([&] { modules::quantize(*model, modules::Nf4Options().targets({"0"})); }),
      ContainsSubstring("\"0\" matches no pacer::modules::Linear of the model"));
}

}  // namespace pacer::testing::lora_convolution
