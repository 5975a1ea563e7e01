// Low-rank adapters: results and gradients beside LibTorch's own operations in fp64, what is frozen, and what
// may be done to them between steps.
#include "support/catch.h"

#include <cmath>

#include <ATen/autocast_mode.h>
#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/modules/recompute.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"

namespace pacer::testing::lora {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using torch::Tensor;

// Attention-like: three layers over one input, one behind them.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width = 12) {
    q_proj = register_module("q_proj", modules::Linear(width, width));
    k_proj = register_module("k_proj", modules::Linear(torch::nn::LinearOptions(width, 8).bias(false)));
    o_proj = register_module("o_proj", modules::Linear(width + 8, width));
    head = register_module("head", torch::nn::Linear(width, 5));
  }
  Tensor forward(const Tensor& x, bool together = false) {
    const std::vector<Tensor> qk =
        together ? modules::forward_together(x, {q_proj, k_proj}) : std::vector<Tensor>{q_proj(x), k_proj(x)};
    return head(o_proj(torch::cat({qk[0].tanh(), qk[1]}, -1)));
  }
  modules::Linear q_proj = nullptr, k_proj = nullptr, o_proj = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Block);

LoraOptions options(int64_t r = 3) { return LoraOptions(r).alpha(6).targets({"*_proj"}); }

// B is zero at first, so that A would have no gradient.
void fill_adapters(torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    if (item.key().find("lora_") == std::string::npos) continue;
    const torch::NoGradGuard no_grad;
    item.value().normal_(0, 0.3);
  }
}

// The rule, in operations of LibTorch.
Tensor reference(const modules::Linear& layer, const Tensor& x) {
  Tensor y = x.matmul(layer->weight.t());
  if (layer->bias.defined()) y = y + layer->bias;
  for (const modules::LoraAdapter& adapter : layer->active_adapters()) {
    y = y + adapter->scale() * x.matmul(adapter->A.t()).matmul(adapter->B.t());
  }
  return y;
}
Tensor reference(const Block& block, const Tensor& x) {
  const Tensor together = torch::cat({reference(block->q_proj, x).tanh(), reference(block->k_proj, x)}, -1);
  return at::linear(reference(block->o_proj, together), block->head->weight, block->head->bias);
}

std::vector<std::string> trained(const torch::nn::Module& model) { return modules::trainable(model).keys(); }

}  // namespace

TEST_CASE("results and gradients of adapters are those of LibTorch's operations in fp64", "[lora]") {
  for (const bool together : {false, true}) {
    torch::manual_seed(3);
    Block block;
    modules::add_lora(*block, options());
    fill_adapters(*block);
    block->to(at::kDouble);
    block->q_proj->bias.requires_grad_();
    block->o_proj->weight.requires_grad_();
    const Tensor x = torch::randn({2, 7, 12}, at::kDouble).requires_grad_();
    Tensor twin = x.detach().clone().requires_grad_();
    const Tensor direction = torch::randn({2, 7, 5}, at::kDouble);

    const Tensor y = block->forward(x, together), wanted = reference(block, twin);
    CHECK((y - wanted).abs().max().item<double>() < 1e-12);
    std::vector<Tensor> inputs = {x}, twins = {twin};
    for (const auto& item : modules::trainable(*block)) {
      inputs.push_back(item.value());
      twins.push_back(item.value());
    }
    REQUIRE(inputs.size() == 9);
    const auto found = torch::autograd::grad({(y * direction).sum()}, inputs);
    const auto expected = torch::autograd::grad({(wanted * direction).sum()}, twins);
    for (size_t i = 0; i < found.size(); ++i) {
      CAPTURE(i);
      CHECK(expected[i].abs().max().item<double>() > 1e-3);
      CHECK((found[i] - expected[i]).abs().max().item<double>() < 1e-10);
    }
  }
}

TEST_CASE("a new adapter changes nothing but what is trained", "[lora]") {
  Block block;
  const Tensor x = torch::randn({4, 12});
  const Tensor before = block->forward(x);
  const auto layers = modules::add_lora(*block, options());
  CHECK(layers == std::vector<std::string>{"q_proj", "k_proj", "o_proj"});
  CHECK(trained(*block) == std::vector<std::string>{"q_proj.lora_default.A", "q_proj.lora_default.B",
                                                    "k_proj.lora_default.A", "k_proj.lora_default.B",
                                                    "o_proj.lora_default.A", "o_proj.lora_default.B"});
  CHECK(torch::allclose(block->forward(x), before, 1e-6, 1e-6));
  const modules::LoraAdapter adapter = block->q_proj->adapter("default");
  CHECK(adapter->scale() == 2);
  CHECK(adapter->A.abs().max().item<double>() <= 1 / std::sqrt(12.0));
  CHECK(adapter->B.count_nonzero().item<int64_t>() == 0);
  CHECK(modules::LoraAdapter(12, 12, LoraOptions(4))->scale() == 1);
  CHECK(modules::LoraAdapter(12, 12, LoraOptions(4).alpha(6).rslora(true))->scale() == 3);
}

TEST_CASE("in 16 bits and under autocast a layer with an adapter computes in that dtype", "[lora]") {
  torch::manual_seed(5);
  modules::Linear layer(16, 24);
  torch::nn::ModuleList model(layer);
  modules::add_lora(*model, LoraOptions(4).targets({"0"}));
  fill_adapters(*layer);
  const Tensor x = torch::randn({9, 16}).requires_grad_();
  const Tensor wanted = reference(layer, x);
  const Autocast autocast(at::kCPU);
  const Tensor y = layer(x);
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK((y.to(at::kFloat) - wanted).norm().item<double>() < 0.01 * wanted.norm().item<double>());
  y.sum().backward();
  CHECK(x.grad().scalar_type() == at::kFloat);
  CHECK(layer->adapter("default")->A.grad().scalar_type() == at::kFloat);
}

TEST_CASE("dropout of an adapter drops parts of its input, the same ones in backward", "[lora]") {
  torch::manual_seed(6);
  Block block;
  modules::add_lora(*block, options().dropout(0.5));
  fill_adapters(*block);
  modules::Linear layer = block->q_proj;
  const modules::LoraAdapter adapter = layer->adapter("default");
  // Rows of the unit matrix tell which element was dropped.
  const Tensor x = torch::eye(12).requires_grad_();
  const auto difference = [&] { return (layer(x) - x.matmul(layer->weight.t()) - layer->bias).detach(); };
  torch::manual_seed(11);
  const Tensor first = difference();
  torch::manual_seed(11);
  CHECK(first.equal(difference()));
  CHECK_FALSE(first.equal(difference()));
  const Tensor full = adapter->scale() * adapter->A.t().matmul(adapter->B.t()).detach();
  const Tensor kept = first.abs().sum(1).gt(1e-6);
  CHECK(kept.sum().item<int64_t>() > 0);
  CHECK(kept.sum().item<int64_t>() < 12);
  CHECK(torch::allclose(first, 2 * full * kept.unsqueeze(1), 1e-4, 1e-5));
  torch::manual_seed(11);
  const Tensor y = layer(x);
  const Tensor dx = torch::autograd::grad({y.sum()}, {x}, {}, true)[0] - layer->weight.sum(0);
  const Tensor expected = 2 * torch::diag(full.sum(1) * kept);
  CHECK(torch::allclose(dx.diagonal(), expected.diagonal(), 1e-4, 1e-5));
  block->eval();
  CHECK(torch::allclose(difference(), full, 1e-4, 1e-5));
}

TEST_CASE("dropout in a recomputed region is what forward drew", "[lora]") {
  torch::manual_seed(8);
  Block block;
  modules::add_lora(*block, options().dropout(0.25));
  fill_adapters(*block);
  const Tensor x = torch::randn({6, 12});
  const auto gradients = [&](bool recomputed) {
    torch::manual_seed(21);
    block->zero_grad();
    const auto forward = [part = block.get()](const Tensor& in) { return part->forward(in); };
    (recomputed ? recompute(*block, forward, x) : forward(x)).square().sum().backward();
    std::vector<Tensor> result;
    for (const auto& item : modules::trainable(*block)) result.push_back(item.value().grad().clone());
    return result;
  };
  const auto plain = gradients(false), again = gradients(true);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(plain[i].equal(again[i]));
}

TEST_CASE("merged weights compute what adapters added, and unmerge brings back every byte", "[lora]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    torch::manual_seed(7);
    Block block;
    block->to(dtype);
    modules::add_lora(*block, options());
    fill_adapters(*block);
    const Tensor before = block->q_proj->weight.detach().clone();
    const Tensor x = torch::randn({5, 12}).to(dtype);
    const modules::LoraAdapter adapter = block->q_proj->adapter("default");
    const Tensor sum =
        before.to(at::kDouble) +
        adapter->scale() * adapter->B.detach().to(at::kDouble).matmul(adapter->A.detach().to(at::kDouble));
    modules::merge(*block);
    CHECK(torch::allclose(block->q_proj->weight.to(at::kDouble), sum, dtype == at::kBFloat16 ? 0.004 : 1e-6,
                          1e-6));
    CHECK(block->q_proj(x).equal(at::linear(x, block->q_proj->weight, block->q_proj->bias)));
    modules::merge(*block);  // once is enough
    CHECK_THAT(message_of<InvalidArgument>([&] { modules::set_adapter(*block, ""); }),
               ContainsSubstring("unmerge() first"));
    CHECK_THAT(message_of<InvalidArgument>(
                   [&] { modules::quantize(*block, modules::Nf4Options().targets({"q_proj"})); }),
               ContainsSubstring("unmerge() first"));
    modules::unmerge(*block);
    CHECK(block->q_proj->weight.equal(before));
    modules::merge(*block);
    {
      const torch::NoGradGuard no_grad;
      block->k_proj->weight.add_(1);
    }
    CHECK_THAT(message_of<InvalidArgument>([&] { modules::unmerge(*block); }), ContainsSubstring("k_proj"));
    CHECK_FALSE(block->q_proj->weight.equal(before));  // nothing was half-changed
    modules::remove_adapter(*block, "default");
    CHECK(block->q_proj->is_plain());
    CHECK(modules::adapters(*block).empty());
  }
}

TEST_CASE("of several adapters one takes part and is trained", "[lora]") {
  Block block;
  modules::add_lora(*block, options().name("a"));
  fill_adapters(*block);
  const Tensor x = torch::randn({3, 12});
  const Tensor with_a = block->forward(x);
  modules::add_lora(*block, LoraOptions(2).targets({"q_proj"}).name("b"));
  CHECK(modules::adapters(*block) == std::vector<std::string>{"a", "b"});
  CHECK(trained(*block) == std::vector<std::string>{"q_proj.lora_b.A", "q_proj.lora_b.B"});
  modules::set_adapter(*block, "");
  const Tensor without = block->forward(x);
  CHECK_FALSE(without.equal(with_a));
  CHECK_THAT(message_of<InvalidArgument>([&] { modules::trainable(*block); }),
             ContainsSubstring("add_lora() first"));
  modules::set_adapter(*block, "a");
  CHECK(block->forward(x).equal(with_a));
  CHECK(trained(*block).size() == 6);
  modules::remove_adapter(*block, "a");
  CHECK(block->forward(x).equal(without));
  CHECK(modules::adapters(*block) == std::vector<std::string>{"b"});
}

TEST_CASE("a clone of a layer has its adapters, and what is frozen stays frozen", "[lora]") {
  modules::Linear layer(8, 8);
  layer->weight.requires_grad_(false);
  layer->add_adapter(LoraOptions(2).name("a"));
  layer->add_adapter(LoraOptions(2).name("b"));
  fill_adapters(*layer);
  const auto clone = std::dynamic_pointer_cast<modules::LinearImpl>(layer->clone());
  CHECK(trained(*clone) == trained(*layer));
  const Tensor x = torch::randn({3, 8});
  CHECK(clone->forward(x).equal(layer(x)));
  {
    const torch::NoGradGuard no_grad;
    clone->adapter("b")->B.zero_();
  }
  CHECK_FALSE(clone->forward(x).equal(layer(x)));
}

TEST_CASE("targets name layers by their whole name or the last parts of it", "[lora]") {
  const auto matches = [](const char* target) {
    return modules::matches_target("model.layers.11.self_attn.q_proj", target);
  };
  for (const char* target :
       {"q_proj", "*_proj", "self_attn.q_proj", "self_attn.*", "layers.*.self_attn.q_proj", "model.**", "**",
        "layers.1?.**", "model.layers.11.self_attn.q_proj"}) {
    CAPTURE(target);
    CHECK(matches(target));
  }
  for (const char* target :
       {"", "proj", "q_pro", "_proj", "model", "model.*", "attn.q_proj", "layers.?.**"}) {
    CAPTURE(target);
    CHECK_FALSE(matches(target));
  }
}

TEST_CASE("what cannot get an adapter is refused with the reason, and nothing has changed", "[lora]") {
  Block block;
  const auto refused = [&](const LoraOptions& wrong, const char* reason) {
    CHECK_THAT(message_of<InvalidArgument>([&] { modules::add_lora(*block, wrong); }),
               ContainsSubstring(reason));
    CHECK(modules::adapters(*block).empty());
    CHECK(block->q_proj->weight.requires_grad());
  };
  refused(LoraOptions(2), "needs targets");
  refused(LoraOptions(2).targets({"q_proj", "query"}), "\"query\" matches no pacer::modules::Linear");
  refused(LoraOptions(2).targets({"head"}), "torch::nn::Linear");
  refused(LoraOptions(0).targets({"*_proj"}), "r must be at least 1");
  refused(options().dropout(1), "dropout must be in [0, 1)");
  refused(options().alpha(NAN), "alpha must be");
  refused(options().name("a.b"), "without dots");
  modules::Linear twin(12, 12);
  twin->weight = twin->register_parameter("tied", block->q_proj->weight);
  block->register_module("twin", twin);
  refused(options(), "tied");
  CHECK_THAT(message_of<InvalidArgument>([&] { modules::merge(*block); }),
             ContainsSubstring("no active adapter"));
  CHECK_THAT(message_of<InvalidArgument>([&] { modules::set_adapter(*block, "x"); }),
             ContainsSubstring("no adapter called x"));

  modules::add_lora(*block, LoraOptions(2).targets({"k_proj", "o_proj"}));
  CHECK_THAT(
      message_of<InvalidArgument>([&] { modules::add_lora(*block, LoraOptions(2).targets({"k_proj"})); }),
      ContainsSubstring("called default already"));
  CHECK_THAT(message_of<InvalidArgument>([&] {
               block->k_proj(torch::zeros({2, 11}));
             }),
             ContainsSubstring("takes [..., 12]"));
  block->q_proj->add_adapter(LoraOptions(2));
  block->k_proj->adapter("default")->options.dropout(0.5);
  CHECK_THAT(message_of<InvalidArgument>([&] {
               modules::forward_together(torch::zeros({2, 12}), {block->q_proj, block->k_proj});
             }),
             ContainsSubstring("adapters with dropout 0 and 0.5"));
}

TEST_CASE("a layer without rows, and a gradient that reaches one of several results", "[lora]") {
  Block block;
  modules::add_lora(*block, options());
  fill_adapters(*block);
  const Tensor none = block->forward(torch::zeros({0, 12}), true);
  CHECK(none.sizes() == at::IntArrayRef({0, 5}));
  none.sum().backward();
  CHECK(block->q_proj->adapter("default")->A.grad().count_nonzero().item<int64_t>() == 0);

  block->zero_grad();
  const Tensor x = torch::randn({3, 12}).requires_grad_();
  modules::forward_together(x, {block->q_proj, block->k_proj})[1].sum().backward();
  CHECK(block->k_proj->adapter("default")->A.grad().defined());
  const Tensor of_q = block->q_proj->adapter("default")->A.grad();
  CHECK((!of_q.defined() || of_q.count_nonzero().item<int64_t>() == 0));
  Tensor twin = x.detach().clone().requires_grad_();
  reference(block->k_proj, twin).sum().backward();
  CHECK(torch::allclose(x.grad(), twin.grad(), 1e-5, 1e-6));
}

}  // namespace pacer::testing::lora
