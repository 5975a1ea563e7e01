// LayerNormLinear, LayerNormMlp and TransformerLayer beside the same formulas in fp64, and beside the same
// layers of torch::nn in 16 bits.
#include "support/catch.h"

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/container/any.h>

#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/recompute.h>

#include "support/kernels/fused_reference.h"
#include "support/modules/autocast.h"
#include "support/modules/fused_16_bits.h"

namespace pacer::testing::fused_layers {
namespace {

using Catch::Matchers::ContainsSubstring;

}  // namespace

TEST_CASE("fused layers are their formulas, forward and backward", "[modules][fused]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    randomize(*layer);
    const Tensor x = batch() * 2 + 0.5;
    const Tensor dy = torch::randn_like(layer->forward(x));
    const Pass found = fused_pass(*layer, x, dy);
    CHECK(found.y.scalar_type() == at::kFloat);
    // fp32 sums of up to 64 terms and 32 rows, a few in a row.
    CHECK(largest_error(found, reference_pass(*layer, x, dy)) < 3e-6);
    CHECK(largest_error(fused_pass(*layer, x.transpose(0, 1).contiguous().transpose(0, 1), dy), found) == 0);
  });
}

TEST_CASE("in 16 bits fused layers are as exact as those of torch::nn", "[modules][fused]") {
  // LibTorch's function for rms is of fp32 operators, as exact as ours; what is left is chance.
  check_16_bits(
      [](auto& layer) { randomize(layer); },
      [](const auto& layer) { return layer.options.normalization() == Normalization::rms ? 1.5 : 1.3; });
}

TEST_CASE("what fused layers drop follows from the seed alone", "[modules][fused][dropout]") {
  constexpr double kP = 0.3;
  modules::TransformerLayer layer(
      modules::TransformerLayerOptions(32, 4).ffn(64).projection_dropout(kP).mlp_dropout(kP));
  randomize(*layer);
  const Tensor x = batch(), dy = torch::randn_like(x);
  torch::manual_seed(3);
  const Pass found = fused_pass(*layer, x, dy);
  torch::manual_seed(3);
  const DroppedElements dropped{dropout_factors(kP, {32, 32}), dropout_factors(kP, {32, 32})};
  CHECK(largest_error(found, reference_pass(*layer, x, dy, dropped)) < 3e-6);
  CHECK_FALSE(fused_pass(*layer, x, dy).y.equal(found.y));  // another seed

  torch::manual_seed(3);
  CHECK(largest_error(recomputed_pass(*layer, x, dy), found) == 0);

  {
    const Autocast on(at::kCPU);
    torch::manual_seed(3);
    const Pass narrow = fused_pass(*layer, x, dy), exact = reference_pass(*layer, x, dy, dropped);
    CHECK(largest_error(narrow, exact) < 0.03);  // another mask would make it about 0.6
  }
  layer->eval();
  CHECK(largest_error(fused_pass(*layer, x, dy), reference_pass(*layer, x, dy)) < 3e-6);
  layer->train();
  layer->options.dropout(0);
  CHECK(largest_error(fused_pass(*layer, x, dy), reference_pass(*layer, x, dy)) < 3e-6);
  layer->options.projection_dropout(1);
  CHECK_THROWS_WITH(layer->forward(x), ContainsSubstring("TransformerLayer is 1, but must be in [0, 1)"));
}

TEST_CASE("what happens around a pass of a fused layer leaves its results alone", "[modules][fused]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    randomize(*layer);
    const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
    const Pass wanted = fused_pass(*layer, x, dy);
    const auto on = [&](const Tensor& input) {
      layer->zero_grad();
      const Tensor leaf = input.detach().requires_grad_();
      return std::make_pair(leaf, layer->forward(leaf));
    };

    const Tensor shifted = torch::empty({x.numel() + 1}).narrow(0, 1, x.numel()).view(x.sizes()).copy_(x);
    const auto [unaligned, of_unaligned] = on(shifted);
    of_unaligned.backward(dy);
    CHECK(of_unaligned.equal(wanted.y));
    CHECK(unaligned.grad().equal(wanted.dx));

    const auto [twice, of_twice] = on(x);
    of_twice.backward(dy, /*retain_graph=*/true);
    of_twice.backward(dy);
    CHECK(twice.grad().equal(wanted.dx * 2));

    const auto [later, of_later] = on(x);
    {
      const torch::NoGradGuard no_grad;  // what backward does not read may change
      const auto parameters = layer->named_parameters();
      if (const Tensor* bias = parameters.find("mlp.fc2.bias")) bias->add_(1);
      const Autocast other(at::kCPU);
      torch::AutoGradMode with_grad(true);
      of_later.backward(dy);
    }
    CHECK(later.grad().equal(wanted.dx));
  });
}

TEST_CASE("gradients are added up inside the nodes of a fused layer, not between them", "[modules][fused]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    const Tensor y = layer->forward(batch().requires_grad_());
    std::set<std::pair<torch::autograd::Node*, uint32_t>> ways;
    std::set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> waiting = {y.grad_fn().get()};
    while (!waiting.empty()) {
      torch::autograd::Node* const node = waiting.back();
      waiting.pop_back();
      if (!seen.insert(node).second) continue;
      for (const auto& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        CAPTURE(node->name(), edge.function->name());
        CHECK(ways.emplace(edge.function.get(), edge.input_nr).second);
        waiting.push_back(edge.function.get());
      }
    }
    CHECK(seen.size() > layer->parameters().size());
  });
}

TEST_CASE("an attention mask and causal attention", "[modules][fused]") {
  modules::TransformerLayer layer(modules::TransformerLayerOptions(32, 4).ffn(64));
  randomize(*layer);
  const Tensor x = batch();
  const Tensor mask = torch::ones({16, 16}, at::kBool).tril();
  const Tensor masked = layer->forward(x, mask);
  CHECK(relative_error(masked, reference(*layer, x.to(at::kDouble), {}, mask)) < 3e-6);
  layer->options.causal(true);
  CHECK(relative_error(layer->forward(x), masked) < 3e-6);
  CHECK_THROWS_WITH(layer->forward(x, mask), ContainsSubstring("no mask with causal(true)"));
  torch::nn::AnyModule any(layer);
  CHECK(any.forward(x).equal(layer->forward(x)));
}

TEST_CASE("a frozen parameter of a fused layer gets no gradient, and others what they got",
          "[modules][fused]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    const Tensor x = batch();
    const Tensor dy = torch::randn_like(layer->forward(x));
    const Pass all = fused_pass(*layer, x, dy);
    for (auto& item : layer->named_parameters()) {
      CAPTURE(item.key());
      item.value().set_requires_grad(false);
      item.value().mutable_grad() = Tensor();
      Pass rest = fused_pass(*layer, x, dy);
      CHECK(rest.gradients.count(item.key()) == 0);
      rest.gradients[item.key()] = all.gradients.at(item.key());
      CHECK(largest_error(rest, all) == 0);
      item.value().set_requires_grad(true);
    }
    for (Tensor& parameter : layer->parameters()) parameter.set_requires_grad(false);
    CHECK(relative_error(fused_pass(*layer, x, dy).dx, all.dx) == 0);
    torch::NoGradGuard no_grad;
    CHECK(layer->forward(x).equal(all.y));
  });
}

TEST_CASE("fused layers take no rows, clone, and refuse what they cannot do", "[modules][fused][errors]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    const Tensor nothing = torch::zeros({0, 16, 32}).requires_grad_();
    const Tensor y = layer->forward(nothing);
    CHECK(y.size(0) == 0);
    y.sum().backward();
    for (const Tensor& parameter : layer->parameters()) {
      CHECK(parameter.grad().equal(torch::zeros_like(parameter)));
    }
    using Impl = typename decltype(layer)::ContainedType;
    const auto clone = std::dynamic_pointer_cast<Impl>(layer->clone());
    CHECK(clone->forward(batch()).equal(layer->forward(batch())));
    CHECK_FALSE(clone->parameters()[0].is_same(layer->parameters()[0]));

    CHECK_THROWS_WITH(layer->forward(torch::zeros({2, 16, 31})), ContainsSubstring("[2, 16, 31]"));
    CHECK_THROWS_WITH(layer->forward(torch::zeros({2, 16, 32}, at::kDouble)),
                      ContainsSubstring("not in Double; cast its input"));
    const Tensor x = batch().requires_grad_();
    const Tensor z = layer->forward(x);
    CHECK_THROWS_WITH(torch::autograd::grad({z.sum()}, {x}, {}, std::nullopt, /*create_graph=*/true),
                      ContainsSubstring("no second derivative"));
  });
  // One number is not nothing.
  modules::LayerNormMlp single(modules::LayerNormMlpOptions(1, 4).residual(true));
  const Tensor alone = single(torch::ones({1, 1}));
  CHECK(alone.allclose(single(torch::ones({2, 1})).narrow(0, 1, 1)));
  modules::LayerNormLinear replaced(32, 16);
  replaced->norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}));
  CHECK_THROWS_WITH(replaced(batch()), ContainsSubstring("needs a norm with a weight of 32 elements"));
  modules::LayerNormLinear shrunk(modules::LayerNormLinearOptions(32, 16).normalization(Normalization::rms));
  shrunk->rms_norm = modules::RmsNorm(8);
  CHECK_THROWS_WITH(shrunk(batch()), ContainsSubstring("needs a norm with a weight of 32 elements"));
  CHECK_THROWS_WITH(modules::LayerNormLinear(0, 4), ContainsSubstring("above 0, not 0 and 4"));
  CHECK_THROWS_WITH(modules::LayerNormMlp(4, -1), ContainsSubstring("above 0, not 4 and -1"));
  CHECK_THROWS_WITH(modules::LayerNormMlp(modules::LayerNormMlpOptions(4, 4).dropout(1)),
                    ContainsSubstring("[0, 1)"));
  CHECK_THROWS_WITH(modules::TransformerLayer(modules::TransformerLayerOptions(32, 5)),
                    ContainsSubstring("multiple of heads"));
  for (const double p : {-.1, 1.0}) {
    CHECK_THROWS_WITH(modules::TransformerLayer(modules::TransformerLayerOptions(32, 4).attention_dropout(p)),
                      ContainsSubstring("attention_dropout must be in [0, 1)"));
  }
  CHECK_THROWS_WITH(
      modules::TransformerLayer(modules::TransformerLayerOptions(32, 4))->forward(torch::zeros({2, 32})),
      ContainsSubstring("takes [batch, sequence, 32]"));
}

TEST_CASE("in 8 bits fused layers are as exact as their parts one by one", "[modules][fused][fp8]") {
  for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
    for (const bool narrow_stream : {true, false}) {
      for_all_layers([&](auto layer) {
        CAPTURE(layer->name(), recipe == Fp8Recipe::delayed, narrow_stream);
        randomize(*layer);
        const auto options = Fp8Options().recipe(recipe);
        const auto ours = std::make_shared<Fp8Scaling>(*layer, options);
        const auto theirs = std::make_shared<Fp8Scaling>(*layer, options);
        const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
        const Pass exact = reference_pass(*layer, x, dy);
        const Autocast on(at::kCPU);
        const Tensor in = narrow_stream ? x.to(at::kBFloat16) : x;
        for (int step = 0; step < 2; ++step) {
          CAPTURE(step);
          Pass found, parts;
          {
            const Fp8Scope scope(ours);
            found = fused_pass(*layer, in, dy);
          }
          {
            const Fp8Scope scope(theirs);
            parts = pass(
                *layer, [&](const Tensor& t) { return reference(*layer, t); }, in, dy);
          }
          CHECK(relative_error(found.y, exact.y) <= 1.1 * relative_error(parts.y, exact.y));
          CHECK(relative_error(found.y, exact.y) > 0.005);  // it did compute in 8 bits
          CHECK(largest_error(found, exact) <= 1.15 * largest_error(parts, exact));
          ours->update();
          theirs->update();
          // Magnitudes of the same tensors, which differ by roundings.
          const auto of_ours = ours->state(), of_theirs = theirs->state();
          for (const auto& [name, state] : of_theirs) {
            CAPTURE(name);
            // A scale is a power of two, so that a rounding may double it.
            const double part = name.find(".scale") == std::string::npos ? 0.25 : 1;
            CHECK((of_ours.at(name) - state).abs().le(state.abs() * part).all().template item<bool>());
          }
        }
        CHECK(ours->other_calls() == 0);
      });
    }
  }
}

TEST_CASE("an evaluation in inference mode leaves 8-bit training alone", "[modules][fused][fp8]") {
  modules::TransformerLayer layer(modules::TransformerLayerOptions(32, 4));
  const auto scaling = std::make_shared<Fp8Scaling>(*layer);
  const Fp8Scope scope(scaling);
  layer->eval();
  {
    const c10::InferenceMode inference;
    layer->forward(batch());
  }
  layer->train();
  const Pass after = fused_pass(*layer, batch(), torch::ones({2, 16, 32}));
  CHECK(after.gradients.size() == layer->parameters().size());
}

TEST_CASE("a linear layer of a fused layer may stay in 16 bits", "[modules][fused][fp8]") {
  modules::TransformerLayer layer(modules::TransformerLayerOptions(32, 4).ffn(64));
  randomize(*layer);
  const Tensor x = batch(), dy = torch::randn_like(x);
  const Pass exact = reference_pass(*layer, x, dy);
  double errors[2];
  for (const int64_t kept : {0, 3}) {
    const auto scaling =
        std::make_shared<Fp8Scaling>(*layer, Fp8Options().recipe(Fp8Recipe::current).keep_first(kept));
    CHECK(scaling->layers() == static_cast<size_t>(4 - kept));
    const Fp8Scope scope(scaling);
    errors[kept == 0 ? 0 : 1] = relative_error(fused_pass(*layer, x, dy).y, exact.y);
  }
  CHECK(errors[1] < 0.8 * errors[0]);

  const auto scaling = std::make_shared<Fp8Scaling>(*layer);
  const Fp8Scope scope(scaling);
  layer->eval();
  fused_pass(*layer, x, dy);
  CHECK(scaling->amax().eq(0).all().item<bool>());
  layer->train();
  fused_pass(*layer, x, dy);
  CHECK(scaling->amax().gt(0).all().item<bool>());
  modules::TransformerLayer narrow(modules::TransformerLayerOptions(32, 4).ffn(40));
  randomize(*narrow);
  const auto of_some = std::make_shared<Fp8Scaling>(*narrow);
  {
    const Fp8Scope some(of_some);
    CHECK(largest_error(fused_pass(*narrow, x, dy), reference_pass(*narrow, x, dy)) < 0.2);
  }
  CHECK(of_some->other_calls() == 2);

  const Pass odd = fused_pass(*layer, batch({1, 15, 32}), torch::ones({1, 15, 32}));
  CHECK(scaling->other_calls() == 4);
  CHECK(relative_error(odd.y, reference(*layer, batch({1, 15, 32}).to(at::kDouble))) < 0.01);
}

}  // namespace pacer::testing::fused_layers
