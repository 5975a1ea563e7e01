// What a fused layer gives at the end of a recomputed region is not computed a second time, and only there.
#include "support/catch.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/modules/detail/replay_memory.h>
#include <pacer/modules/layer_norm_mlp.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/transformer_layer.h>

#include "support/modules/call_counts.h"

namespace pacer::testing::last_product {
namespace {

using torch::Tensor;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout = 0) {
    const auto options = modules::TransformerLayerOptions(16, 2).ffn(32).mlp_dropout(dropout);
    first = register_module("first", modules::TransformerLayer(options));
    second = register_module("second", modules::TransformerLayer(options));
    mlp = register_module("mlp", modules::LayerNormMlp(modules::LayerNormMlpOptions(16, 32)));
  }
  modules::TransformerLayer first{nullptr}, second{nullptr};
  modules::LayerNormMlp mlp{nullptr};
};
TORCH_MODULE(Net);

using Function = std::function<Tensor(const Tensor& x)>;

struct Gradients {
  std::vector<Tensor> all;
  int64_t products;  // of backward
};

Gradients gradients_of(Net& net, const Function& run, const Tensor& x) {
  net->zero_grad();
  const Tensor leaf = x.detach().clone().requires_grad_();
  torch::manual_seed(5);
  const Tensor loss = (run(leaf) * torch::arange(16)).sum();
  const CallCounts counts;
  loss.backward();
  Gradients found{{leaf.grad()}, counts.products()};
  for (const Tensor& parameter : net->parameters()) found.all.push_back(parameter.grad());
  return found;
}

bool are_equal(const Gradients& a, const Gradients& b) {
  for (size_t i = 0; i < a.all.size(); ++i) {
    if (a.all[i].defined() != b.all[i].defined()) return false;
    if (a.all[i].defined() && !a.all[i].equal(b.all[i])) return false;
  }
  return true;
}

// Products of the second run: those of a recomputed backward without those of a plain one.
int64_t products_again(Net& net, const Function& run) {
  torch::manual_seed(7);
  const Tensor x = torch::randn({2, 4, 16});
  const Gradients plain = gradients_of(net, run, x);
  const auto recomputed = [&](const Tensor& in) { return recompute(*net, run, in); };
  const Gradients again = gradients_of(net, recomputed, x);
  CHECK(are_equal(again, plain));
  return again.products - plain.products;
}

int64_t products_of(const Function& run) {
  const torch::NoGradGuard no_grad;
  const CallCounts counts;
  run(torch::randn({2, 4, 16}));
  return counts.products();
}

}  // namespace

TEST_CASE("a recomputed region leaves out the last product of a fused layer that it returns",
          "[modules][recompute][fused]") {
  for (const double dropout : {0.0, 0.3}) {
    CAPTURE(dropout);
    Net net(dropout);
    const std::vector<std::pair<std::string, Function>> ends = {
        {"one layer", [&](const Tensor& x) { return net->first(x); }},
        {"two layers", [&](const Tensor& x) { return net->second(net->first(x)); }},
        {"one layer twice", [&](const Tensor& x) { return net->first(net->first(x)); }},
        {"a network without its residual", [&](const Tensor& x) { return net->mlp(net->first(x)); }},
        {"behind other operators", [&](const Tensor& x) { return net->first(x.sin()); }},
        {"behind a layer without a graph",
         [&](const Tensor& x) {
           const auto teacher = [&] {
             const c10::InferenceMode inference;
             return net->second(x.detach());
           };
           return net->first(x * teacher().clone());
         }},
    };
    for (const auto& [name, run] : ends) {
      CAPTURE(name);
      CHECK(products_again(net, run) == products_of(run) - 1);
    }
  }
}

TEST_CASE("a region that reads what its last layer gave computes all of it again",
          "[modules][recompute][fused]") {
  Net net;
  const std::vector<std::pair<std::string, Function>> ends = {
      {"an operator", [&](const Tensor& x) { return net->first(x).tanh(); }},
      {"an operator in place", [&](const Tensor& x) { return net->first(x).tanh_(); }},
      {"a sum with the argument", [&](const Tensor& x) { return x + net->first(x); }},
      {"a view", [&](const Tensor& x) { return net->first(x).flatten(0, 1); }},
      {"an earlier layer's result",
       [&](const Tensor& x) {
         const Tensor y = net->first(x);
         net->second(y);
         return y;
       }},
  };
  for (const auto& [name, run] : ends) {
    CAPTURE(name);
    CHECK(products_again(net, run) == products_of(run));
  }

  // Of two results each may be read by the other.
  const Tensor x = torch::randn({2, 4, 16});
  const auto pair = [&](const Tensor& in) {
    const Tensor y = net->first(in);
    return std::make_pair(y, y.square());
  };
  const auto sum = [](const std::pair<Tensor, Tensor>& both) { return both.first + both.second; };
  const Gradients plain = gradients_of(
      net, [&](const Tensor& in) { return sum(pair(in)); }, x);
  CHECK(are_equal(gradients_of(
                      net, [&](const Tensor& in) { return sum(recompute(*net, pair, in)); }, x),
                  plain));
}

TEST_CASE("regions inside a region leave out their own last products", "[modules][recompute][fused]") {
  Net net;
  const Function inner = [&](const Tensor& x) {
    return recompute(
        *net->second, [&](const Tensor& in) { return net->second(in); }, net->first(x));
  };
  // The outer one computes both layers again; the inner one, whose result that is, does so without its last product.
  torch::manual_seed(7);
  const Tensor x = torch::randn({2, 4, 16});
  const Gradients plain = gradients_of(
      net, [&](const Tensor& in) { return net->second(net->first(in)); }, x);
  const Gradients nested = gradients_of(
      net, [&](const Tensor& in) { return recompute(*net, inner, in); }, x);
  CHECK(are_equal(nested, plain));
  const int64_t of_layer = products_of([&](const Tensor& in) { return net->first(in); });
  CHECK(nested.products - plain.products == 3 * of_layer - 1);
}

TEST_CASE("what a region leaves out is not a number where it is read all the same",
          "[modules][recompute][fused]") {
  Net net;
  std::vector<Tensor> seen;
  const Tensor x = torch::randn({2, 4, 16}).requires_grad_();
  recompute(
      *net,
      [&](const Tensor& in) {
        const Tensor y = net->first(in);
        seen.push_back(y.detach());
        return y;
      },
      x)
      .sum()
      .backward();
  REQUIRE(seen.size() == 2);
  CHECK(seen[0].isfinite().all().item<bool>());
  CHECK(seen[1].sizes() == x.sizes());
  CHECK(seen[1].isnan().all().item<bool>());

  const Tensor none = detail::unread_values({3, 5}, torch::kBFloat16);
  CHECK(none.isnan().all().item<bool>());
  CHECK(none.storage().nbytes() == 2);
  CHECK(detail::unread_values({0, 5}, torch::kFloat).numel() == 0);
}

TEST_CASE("a second run that returns something else than what was left out is an error",
          "[modules][recompute][fused]") {
  Net net;
  int runs = 0;
  const Tensor y = recompute(
      *net,
      [&](const Tensor& in) {
        const Tensor result = net->first(in);
        return ++runs == 1 ? result : result * 2;
      },
      torch::randn({2, 4, 16}).requires_grad_());
  CHECK_THROWS_WITH(y.sum().backward(),
                    Catch::Matchers::ContainsSubstring("something else when it was recomputed"));
}

}  // namespace pacer::testing::last_product
