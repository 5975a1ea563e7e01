// Regions that keep results of operators give what plain training gives, to the bit: layers of LibTorch and of pacer, with
// autocast and without, and random numbers.
#include "support/catch.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/device/detail/random_state.h>
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/detail/operator_list.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/transformer_layer.h>

#include "support/modules/autocast.h"

namespace pacer::testing::kept_models {
namespace {

using torch::Tensor;
using Function = std::function<Tensor(const Tensor& x)>;

struct Passed {
  std::vector<Tensor> all;  // the result, and gradients of x and parameters
  Tensor random;            // the state behind it
};

Passed pass(torch::nn::Module& module, const Function& f, const at::IntArrayRef sizes,
            bool autocast = false) {
  module.zero_grad();
  torch::manual_seed(5);
  const Tensor x = torch::randn(sizes).requires_grad_();
  Tensor y;
  {
    const auto cast = autocast ? std::make_unique<Autocast>(at::kCPU) : nullptr;
    y = f(x);
  }
  (y.to(at::kFloat) * torch::arange(y.numel()).view(y.sizes()).cos()).sum().backward();
  Passed passed{{y.detach(), x.grad()}, detail::get_random_state(at::kCPU).cpu};
  for (const Tensor& parameter : module.parameters()) passed.all.push_back(parameter.grad());
  return passed;
}

void check_same(const Passed& a, const Passed& b) {
  CHECK(a.random.equal(b.random));
  for (size_t i = 0; i < a.all.size(); ++i) {
    CAPTURE(i);
    REQUIRE(a.all[i].defined() == b.all[i].defined());
    if (a.all[i].defined()) CHECK(a.all[i].equal(b.all[i]));
  }
}

torch::nn::TransformerEncoderLayer torch_layer(double dropout) {
  return torch::nn::TransformerEncoderLayer(
      torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(dropout));
}

const std::string kWithBmm = "LibTorch's layer";  // its attention is made of products

struct Case {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  Function f;
};

std::vector<Case> cases() {
  using modules::TransformerLayer;
  using modules::TransformerLayerOptions;
  torch::manual_seed(1);
  std::vector<Case> all;
  torch::nn::Sequential mlp(torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::Linear(32, 16));
  all.push_back({"a network of products", mlp.ptr(), [mlp](const Tensor& x) mutable {
                   const Tensor heads = mlp->forward(x).unsqueeze(1);
                   return at::scaled_dot_product_attention(heads, heads, heads).squeeze(1);
                 }});
  auto layer = torch_layer(0.2);
  all.push_back({kWithBmm, layer.ptr(), [layer](const Tensor& x) mutable { return layer(x); }});
  const auto options = TransformerLayerOptions(16, 2).ffn(32);
  for (const auto& [name, given] :
       {std::make_pair("a fused layer", TransformerLayerOptions(options).mlp_dropout(0.3)),
        std::make_pair("a fused layer with positions",
                       TransformerLayerOptions(options).causal(true).rotary(10'000))}) {
    TransformerLayer fused(given);
    all.push_back({name, fused.ptr(), [fused](const Tensor& x) mutable { return fused(x); }});
    all.push_back({std::string(name) + ", read", fused.ptr(),
                   [fused](const Tensor& x) mutable { return fused(x).tanh(); }});
  }
  modules::CausalLm model(modules::CausalLmOptions(40, 16, 2, 2).ffn(32));
  all.push_back({"a decoder with its loss", model.ptr(), [model](const Tensor& x) mutable {
                   const Tensor ids = torch::arange(10).view({2, 5}) % 40;
                   return model->loss(ids, (ids + 1) % 40) * x.sum();
                 }});
  return all;
}

}  // namespace

TEST_CASE("a region that keeps results gives what plain training gives, to the bit", "[recompute][kept]") {
  std::vector<std::string> every = KeptOperators::products().names();
  for (const std::string& name : KeptOperators::attention().names()) every.push_back(name);
  for (const char* name :
       {"aten::gelu", "aten::native_layer_norm", "aten::_softmax", "aten::native_dropout"}) {
    every.emplace_back(name);
  }
  for (Case& tried : cases()) {
    for (const bool autocast : {false, true}) {
      CAPTURE(tried.name, autocast);
      const Passed plain = pass(*tried.module, tried.f, {2, 5, 16}, autocast);
      for (const KeptOperators& kept :
           {KeptOperators(), KeptOperators::products(), KeptOperators::attention(), KeptOperators(every)}) {
        CAPTURE(kept.names());
        const auto again = [&](const Tensor& x) { return recompute(*tried.module, kept, tried.f, x); };
        check_same(pass(*tried.module, again, {2, 5, 16}, autocast), plain);
        const bool has_others = kept.names() != KeptOperators::attention().names();
        if (kept.list()) CHECK((kept.list()->kept > 0) == (has_others || tried.name != kWithBmm));
      }
    }
  }
}

TEST_CASE("random numbers behind a kept operator are those of the first run", "[recompute][kept]") {
  torch::nn::Linear module(16, 16);
  const Function f = [&](const Tensor& x) {
    const Tensor dropped = std::get<0>(at::native_dropout(module(x), 0.5, true));
    return std::get<0>(at::native_dropout(dropped * torch::rand({16}), 0.3, true)) * torch::rand({16});
  };
  const Passed plain = pass(*module, f, {3, 16});
  for (const KeptOperators& kept : {KeptOperators{"aten::native_dropout"}, KeptOperators{"aten::rand"}}) {
    check_same(pass(*module, [&](const Tensor& x) { return recompute(*module, kept, f, x); }, {3, 16}),
               plain);
  }
}

}  // namespace pacer::testing::kept_models
