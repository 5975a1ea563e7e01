// AttentionWindow: which positions its masks leave, that attention by pieces is attention under the mask, and what
// is kept, replayed and refused. The references are loops over positions.
#include <cmath>
#include <limits>

#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/linear.h>

#include <pacer/modules/attention_window.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/transformer_layer.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using Length = std::optional<int64_t>;

// Whether query i sees key j.
bool sees(int64_t i, int64_t j, Length window, WindowForm form) {
  if (j > i) return false;
  if (!window) return true;
  return form == WindowForm::sliding ? i - j < *window : i / *window == j / *window;
}

// softmax(q k^T / sqrt(c)) v in double, row by row.
Tensor attended_by_hand(const Tensor& q, const Tensor& k, const Tensor& v, Length window, WindowForm form) {
  const Tensor x = q.to(at::kDouble), y = k.to(at::kDouble), z = v.to(at::kDouble);
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < q.size(2); ++i) {
    std::vector<int64_t> seen;
    for (int64_t j = 0; j < k.size(2); ++j) {
      if (sees(i, j, window, form)) seen.push_back(j);
    }
    const Tensor of = torch::tensor(seen);
    const Tensor scores = torch::einsum("bhc,bhjc->bhj", {x.select(2, i), y.index_select(2, of)}) /
                          std::sqrt(static_cast<double>(q.size(3)));
    rows.push_back(torch::einsum("bhj,bhjc->bhc", {scores.softmax(-1), z.index_select(2, of)}));
  }
  return torch::stack(rows, 2);
}

constexpr WindowForm kForms[] = {WindowForm::blocks, WindowForm::sliding};

}  // namespace

TEST_CASE("a mask has the positions that the window leaves, true or added", "[modules][window]") {
  for (const WindowForm form : kForms) {
    const AttentionWindow window(form);
    AttentionWindow same = window;
    for (const int64_t sequence : {1, 7, 8}) {
      for (const Length length : {Length(), Length(1), Length(3), Length(4), Length(7), Length(100)}) {
        same.set_length(length);
        const Tensor mask = window.mask(sequence, {}), added = window.mask(sequence, at::kFloat);
        REQUIRE(mask.scalar_type() == at::kBool);
        REQUIRE(mask.sizes() == std::vector<int64_t>{sequence, sequence});
        REQUIRE(added.scalar_type() == at::kFloat);
        for (int64_t i = 0; i < sequence; ++i) {
          for (int64_t j = 0; j < sequence; ++j) {
            const bool expected = sees(i, j, length, form);
            REQUIRE(mask[i][j].item<bool>() == expected);
            REQUIRE(added[i][j].item<float>() == (expected ? 0 : -std::numeric_limits<float>::infinity()));
          }
        }
      }
    }
  }
}

TEST_CASE("attention inside a window is that of a loop over positions, gradients too", "[modules][window]") {
  torch::manual_seed(3);
  for (const WindowForm form : kForms) {
    for (const Length length : {Length(), Length(1), Length(3), Length(4), Length(8), Length(9)}) {
      AttentionWindow window(form);
      window.set_length(length);
      // As a layer has them: queries, keys and values of one product, heads behind positions.
      Tensor of_three = torch::randn({2, 8, 3, 2, 5}), twin = of_three.clone().to(at::kDouble);
      of_three.requires_grad_(true);
      twin.requires_grad_(true);
      const auto at = [](const Tensor& x, int64_t i) { return x.select(2, i).transpose(1, 2); };
      const Tensor y = window.attend(at(of_three, 0), at(of_three, 1), at(of_three, 2));
      const Tensor expected = attended_by_hand(at(twin, 0), at(twin, 1), at(twin, 2), length, form);
      REQUIRE(y.sizes() == expected.sizes());
      REQUIRE(y.to(at::kDouble).allclose(expected, 1e-5, 1e-6));
      const Tensor weights = torch::randn(y.sizes());
      (y * weights).sum().backward();
      (expected * weights).sum().backward();
      REQUIRE(of_three.grad().to(at::kDouble).allclose(twin.grad(), 1e-4, 1e-5));
      // Under the mask, by LibTorch.
      const Tensor masked = at::scaled_dot_product_attention(at(of_three, 0), at(of_three, 1),
                                                             at(of_three, 2), window.mask(8, at::kFloat));
      REQUIRE(y.allclose(masked, 1e-5, 1e-6));
    }
  }
}

TEST_CASE("blocks are what short sequences of their own give", "[modules][window]") {
  torch::manual_seed(4);
  AttentionWindow window;
  window.set_length(4);
  const Tensor q = torch::randn({2, 3, 12, 8}), k = torch::randn({2, 3, 12, 8}),
               v = torch::randn({2, 3, 12, 8});
  const Tensor y = window.attend(q, k, v);
  for (int64_t piece = 0; piece < 3; ++piece) {
    const auto of = [&](const Tensor& x) { return x.narrow(2, 4 * piece, 4); };
    CHECK(of(y).allclose(at::scaled_dot_product_attention(of(q), of(k), of(v), {}, 0.0, true), 1e-6, 1e-6));
  }
}

TEST_CASE("a mask is made again only where something has changed", "[modules][window]") {
  AttentionWindow window(WindowForm::sliding);
  window.set_length(4);
  const Tensor mask = window.mask(8, at::kBool);
  window.set_length(4);
  CHECK(window.mask(8, at::kBool).is_same(mask));
  CHECK_FALSE(window.mask(8, at::kFloat).is_same(mask));
  CHECK(window.mask(9, at::kFloat).size(0) == 9);
  window.set_length(3);
  CHECK(window.mask(8, at::kBool)[7].sum().item<int64_t>() == 3);
  // All lengths from the sequence's on are one window.
  window.set_length(8);
  const Tensor causal = window.mask(8, at::kBool);
  window.set_length(std::nullopt);
  CHECK(window.mask(8, at::kBool).is_same(causal));
}

TEST_CASE("a mask that an evaluation made is one that a training can use", "[modules][window]") {
  AttentionWindow window(WindowForm::sliding);
  window.set_length(2);
  {
    const c10::InferenceMode evaluation;
    window.mask(4, at::kBool);
  }
  Tensor x = torch::randn({1, 1, 4, 8});
  x.requires_grad_(true);
  window.attend(x, x, x).sum().backward();
  CHECK(x.grad().defined());
  CHECK_FALSE(window.mask(4, at::kBool).is_inference());
}

TEST_CASE("a region that is recomputed sees the window of its forward", "[modules][window]") {
  for (const WindowForm form : kForms) {
    AttentionWindow window(form);
    torch::nn::Linear layer(4, 4);
    std::vector<Length> seen;
    const TensorFunction block = [&](const Tensors& x) {
      seen.push_back(window.length());
      const Tensor h = layer(x[0]);
      return Tensors{window.attend(h, h, h)};
    };
    Tensor x = torch::randn({1, 2, 6, 4});
    x.requires_grad_(true);
    window.set_length(2);
    block({x})[0].square().sum().backward();
    const Tensor expected = x.grad().clone();
    x.mutable_grad() = Tensor();
    const Tensor y = recompute_tensors(*layer, "layer", block, {x})[0];
    window.set_length(std::nullopt);
    y.square().sum().backward();
    CHECK(same_bits(x.grad(), expected));
    CHECK((seen == std::vector<Length>{2, 2, 2}));
    CHECK(window.length() == std::nullopt);
  }
}

TEST_CASE("a transformer layer looks back as far as its window", "[modules][window]") {
  AttentionWindow window;
  torch::manual_seed(5);
  const auto options = modules::TransformerLayerOptions(16, 2).causal(true);
  modules::TransformerLayer layer(modules::TransformerLayerOptions(options).window(window)), plain(options),
      masked(modules::TransformerLayerOptions(options).causal(false));
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < layer->parameters().size(); ++i) {
    plain->parameters()[i].copy_(layer->parameters()[i]);
    masked->parameters()[i].copy_(layer->parameters()[i]);
  }
  const Tensor x = torch::randn({2, 8, 16});
  CHECK(same_bits(layer(x), plain(x)));
  window.set_length(3);
  CHECK(layer(x).allclose(masked(x, window.mask(8, at::kBool)), 1e-5, 1e-6));
  CHECK_FALSE(layer(x).allclose(plain(x), 1e-3, 1e-3));
  CHECK(contains(
      refusal([&] { modules::TransformerLayer(modules::TransformerLayerOptions(16, 2).window(window)); }),
      "set causal(true), too"));
}

TEST_CASE("a window refuses what it cannot be, and stays as it is", "[modules][window]") {
  AttentionWindow window;
  window.set_length(4);
  CHECK(contains(refusal([&] { window.set_length(0); }), "at least 1, not 0"));
  CHECK(window.length() == 4);
  CHECK(contains(refusal([&] { window.mask(4, at::kLong); }), "not of Long"));
  CHECK(contains(refusal([&] { window.mask(-1, at::kBool); }), "a sequence of -1 tokens"));
  const Tensor x = torch::zeros({1, 1, 4, 2});
  CHECK(contains(refusal([&] { window.attend(x[0], x[0], x[0]); }), "[batch, heads, sequence, channels]"));
  CHECK(contains(refusal([&] { window.attend(x.narrow(2, 0, 1), x, x); }), "not of 1, 4 and 4 tokens"));
}

}  // namespace pacer::testing
