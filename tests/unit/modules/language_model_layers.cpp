// TransformerLayer as the layer of a language model: shared heads of keys and values, rotary positions, norms of
// heads, and what happens around them. That results are their formulas is in fused_layers.cpp.
#include "support/catch.h"

#include <memory>
#include <string>
#include <vector>

#include <pacer/modules/recompute.h>

#include "support/kernels/fused_reference.h"

namespace pacer::testing::fused_layers {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::TransformerLayer;
using modules::TransformerLayerOptions;

}  // namespace

TEST_CASE("a head of keys and values serves neighbouring heads of queries", "[modules][language_model]") {
  TransformerLayer shared(TransformerLayerOptions(32, 4).ffn(64).causal(true).kv_heads(2).rotary(kTheta));
  TransformerLayer full(TransformerLayerOptions(32, 4).ffn(64).causal(true).rotary(kTheta));
  randomize(*shared);
  const torch::NoGradGuard no_grad;
  const auto of_full = [](const Tensor& rows) {  // [8 heads * 8, ...] -> [12 heads * 8, ...]
    const auto parts = rows.unflatten(0, {8, 8}).split_with_sizes({4, 2, 2}, 0);
    return torch::cat({parts[0], parts[1].repeat_interleave(2, 0), parts[2].repeat_interleave(2, 0)}, 0)
        .flatten(0, 1);
  };
  for (auto& item : full->named_parameters()) {
    const Tensor from = *shared->named_parameters().find(item.key());
    item.value().copy_(item.key().rfind("qkv.linear", 0) == 0 ? of_full(from) : from);
  }
  CHECK(shared->qkv->linear->weight.sizes() == at::IntArrayRef({64, 32}));
  CHECK(relative_error(shared(batch()), full(batch())) < 1e-6);
}

TEST_CASE("a window of shared heads is that of repeated ones", "[modules][language_model][window]") {
  torch::manual_seed(6);
  const Tensor q = torch::randn({2, 4, 14, 8}), k = torch::randn({2, 2, 14, 8}),
               v = torch::randn({2, 2, 14, 8});
  for (const WindowForm form : {WindowForm::blocks, WindowForm::sliding}) {
    AttentionWindow window(form);
    for (const int64_t length : {4, 14}) {
      CAPTURE(form == WindowForm::sliding, length);
      window.set_length(length);
      const Tensor wanted = window.attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1));
      CHECK(relative_error(window.attend(q, k, v), wanted) < 1e-6);
    }
  }
  CHECK_THROWS_WITH(AttentionWindow().attend(q, q.narrow(1, 0, 3), q.narrow(1, 0, 3)),
                    ContainsSubstring("divide those of queries, not 4, 3 and 3"));
}

TEST_CASE("layers of language models are recomputed to the bit, with the window and the offset of forward",
          "[modules][language_model][recompute]") {
  for (TransformerLayerOptions options : language_model_layers()) {
    const AttentionWindow window;
    TransformerLayer layer(options.window(window));
    randomize(*layer);
    const Tensor x = batch(), dy = torch::randn_like(x);
    modules::Rotary rotary = *layer->options.rotary();
    AttentionWindow(window).set_length(5);
    rotary.set_offset(7);
    const Pass wanted = fused_pass(*layer, x, dy);
    const Pass again = pass(
        *layer,
        [&](const Tensor& in) {
          rotary.set_offset(7);
          AttentionWindow(window).set_length(5);
          const Tensor y = recompute(
              *layer, [&](const Tensor& t) { return layer->forward(t); }, in);
          rotary.set_offset(0);
          AttentionWindow(window).set_length(std::nullopt);
          return y;
        },
        x, dy);
    CHECK(largest_error(again, wanted) == 0);
    CHECK(largest_error(fused_pass(*layer, x, dy), wanted) > 0.01);
  }
}

TEST_CASE("layers of language models have the names that follow from their options",
          "[modules][language_model]") {
  const std::vector<TransformerLayerOptions> all = language_model_layers();
  std::vector<std::string> names = {"qkv.norm.weight", "qkv.linear.weight", "projection.weight",
                                    "mlp.norm.weight", "mlp.fc1.weight",    "mlp.fc2.weight"};
  CHECK(TransformerLayer(all[0])->named_parameters().keys() == names);
  names.insert(names.begin() + 2, "qkv.linear.bias");
  CHECK(TransformerLayer(all[1])->named_parameters().keys() == names);
  names[2] = "q_norm.weight";
  names.insert(names.begin() + 3, "k_norm.weight");
  const TransformerLayer normed(all[2]);
  CHECK(normed->named_parameters().keys() == names);
  CHECK(normed->q_norm->weight.numel() == 16);
  CHECK(normed->qkv->linear->weight.sizes() == at::IntArrayRef({128, 32}));
  CHECK(normed->projection->weight.sizes() == at::IntArrayRef({32, 64}));
  const auto clone = std::dynamic_pointer_cast<modules::TransformerLayerImpl>(normed->clone());
  CHECK_FALSE(clone->q_norm->weight.is_same(normed->q_norm->weight));
  CHECK(clone->named_parameters().keys() == names);
}

TEST_CASE("a TransformerLayer refuses heads that cannot be", "[modules][language_model][errors]") {
  const TransformerLayerOptions options(32, 4);
  const auto with = [&](const auto& change) {
    TransformerLayerOptions changed = options;
    change(changed);
    return TransformerLayer(changed);
  };
  CHECK_THROWS_WITH(with([](auto& o) { o.kv_heads(3); }),
                    ContainsSubstring("must divide heads, which are 4, not 3"));
  CHECK_THROWS_WITH(with([](auto& o) { o.kv_heads(0); }), ContainsSubstring("not 0"));
  CHECK_THROWS_WITH(with([](auto& o) { o.head_dim(0); }),
                    ContainsSubstring("head_dim must be above 0, not 0"));
  CHECK_THROWS_WITH(with([](auto& o) { o.head_dim(7).rotary(1e4); }),
                    ContainsSubstring("even number of channels, not 7"));
  CHECK_THROWS_WITH(with([](auto& o) { o.hidden(30); }), ContainsSubstring("give head_dim for others"));
  CHECK_NOTHROW(with([](auto& o) { o.hidden(30).head_dim(8); }));
  TransformerLayer layer = with([](auto& o) { o.qk_norm(true); });
  layer->k_norm->options.eps(1e-3);
  CHECK_THROWS_WITH(layer(batch()), ContainsSubstring("with one eps"));
  layer->k_norm = modules::RmsNorm(4);
  CHECK_THROWS_WITH(layer(batch()), ContainsSubstring("needs a norm with a weight of 8 elements"));
}

}  // namespace pacer::testing::fused_layers
