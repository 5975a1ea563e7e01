// Adapters and weights in 4 bits inside LayerNormLinear, LayerNormMlp, TransformerLayer and CausalLm, beside the same
// formulas in fp64, in which an adapter is part of the weight: W + scale * B A.
#include "support/catch.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>

#include <pacer/modules/causal_lm.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/modules/recompute.h>

#include "support/kernels/fused_reference.h"
#include "support/message_of.h"
#include "support/modules/autocast.h"
#include "support/modules/fused_16_bits.h"

namespace pacer::testing::fused_layers {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using modules::Nf4Options;

// fp32 sums of up to 64 terms and 32 rows, a few in a row.
constexpr double kRounding = 4e-6;

LoraOptions of_rank_3() { return LoraOptions(3).alpha(6).targets({"**"}); }
Nf4Options in_4_bits() { return Nf4Options().targets({"**"}); }

// With adapters in all linear layers, none of them zero.
void adapt(torch::nn::Module& module, const LoraOptions& options = of_rank_3()) {
  modules::add_lora(module, options);
  randomize(module);
}

bool has(const torch::nn::Module& module, const std::string& target) {
  for (const auto& item : module.named_modules()) {
    if (modules::matches_target(item.key(), target)) return true;
  }
  return false;
}

void check_is_formula(const Pass& found, const Pass& wanted) {
  CHECK(largest_error(found, wanted) < kRounding);
  for (const auto& [name, gradient] : wanted.gradients) {
    CAPTURE(name);
    CHECK(gradient.abs().max().item<double>() > 1e-3);
  }
}

}  // namespace

TEST_CASE("fused layers with adapters are their formulas, and only adapters get gradients",
          "[modules][fused][lora]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    adapt(*layer);
    const Tensor x = batch() * 2 + 0.5;
    const Tensor dy = torch::randn_like(layer->forward(x));
    const Pass found = fused_pass(*layer, x, dy);
    CHECK(found.y.scalar_type() == at::kFloat);
    CHECK(found.gradients.size() == modules::trainable(*layer).size());
    check_is_formula(found, reference_pass(*layer, x, dy));
    // What is trained beside the adapters.
    for (const Tensor& parameter : layer->parameters()) parameter.requires_grad_();
    check_is_formula(fused_pass(*layer, x, dy), reference_pass(*layer, x, dy));
  });
}

TEST_CASE("a fused layer takes an adapter in any one of its linear layers", "[modules][fused][lora]") {
  for (const char* target : {"linear", "projection", "fc1", "fc2"}) {
    for_all_layers([&](auto layer) {
      CAPTURE(layer->name(), target);
      if (!has(*layer, target)) return;
      adapt(*layer, LoraOptions(3).alpha(6).targets({target}));
      for (const Tensor& parameter : layer->parameters()) parameter.requires_grad_();
      const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
      const Pass found = fused_pass(*layer, x, dy);
      CHECK(found.gradients.size() == layer->parameters().size());
      check_is_formula(found, reference_pass(*layer, x, dy));
    });
  }
}

TEST_CASE("a new adapter leaves a fused layer as it was, and without it the layer is fused as before",
          "[modules][fused][lora]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    randomize(*layer);
    for (const Tensor& parameter : layer->parameters()) parameter.requires_grad_(false);
    const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
    const Pass before = fused_pass(*layer, x, dy);
    modules::add_lora(*layer, of_rank_3());
    const Pass with = fused_pass(*layer, x, dy);
    CHECK(relative_error(with.y, before.y) < kRounding);
    CHECK(relative_error(with.dx, before.dx) < kRounding);
    CHECK_FALSE(with.gradients.empty());
    modules::set_adapter(*layer, "");
    CHECK(largest_error(fused_pass(*layer, x, dy), before) == 0);
    modules::remove_adapter(*layer, "default");
    CHECK(largest_error(fused_pass(*layer, x, dy), before) == 0);
  });
}

TEST_CASE("a merged adapter of a fused layer is a weight of the fused layer", "[modules][fused][lora]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    adapt(*layer);
    const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
    const Pass active = fused_pass(*layer, x, dy);
    modules::merge(*layer);
    const Pass merged = fused_pass(*layer, x, dy);
    // The sum of weight and adapter is rounded once, which is half an ulp, and the products as before.
    CHECK(relative_error(merged.y, active.y) < kRounding);
    CHECK(relative_error(merged.dx, active.dx) < kRounding);
    CHECK(merged.gradients.empty());
    modules::unmerge(*layer);
    CHECK(largest_error(fused_pass(*layer, x, dy), active) == 0);
    modules::merge(*layer);
    modules::remove_adapter(*layer, "default");
    CHECK(largest_error(fused_pass(*layer, x, dy), merged) == 0);
  });
}

TEST_CASE("in 16 bits fused layers with adapters are as exact as their parts", "[modules][fused][lora]") {
  check_16_bits([](auto& layer) { adapt(layer); }, [](const auto&) { return 1.5; });
}

TEST_CASE("weights in 4 bits inside fused layers multiply by what their codes stand for",
          "[modules][fused][nf4]") {
  for_all_layers([](auto layer) {
    CAPTURE(layer->name());
    randomize(*layer);
    modules::quantize(*layer, in_4_bits());
    const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
    // Norms and biases are still trained.
    const Pass found = fused_pass(*layer, x, dy);
    CHECK(found.gradients.size() == layer->parameters().size());
    check_is_formula(found, reference_pass(*layer, x, dy));

    modules::add_lora(*layer, of_rank_3());
    for (const auto& item : modules::trainable(*layer)) {
      const torch::NoGradGuard no_grad;
      item.value().normal_(0, 0.2);
    }
    const Pass adapted = fused_pass(*layer, x, dy);
    check_is_formula(adapted, reference_pass(*layer, x, dy));
    CHECK_THAT(message_of([&] { modules::merge(*layer); }),
               ContainsSubstring("dequantize() the model first"));
    modules::dequantize(*layer);
    CHECK(largest_error(fused_pass(*layer, x, dy), adapted) == 0);
    modules::set_adapter(*layer, "");
    const Pass fused = fused_pass(*layer, x, dy);
    CHECK(relative_error(fused.y, found.y) < kRounding);
    CHECK(relative_error(fused.dx, found.dx) < kRounding);
  });
}

TEST_CASE("what fused layers and their adapters drop follows from the seed alone",
          "[modules][fused][lora][dropout]") {
  constexpr double kP = 0.3;
  const auto dropped = [] { return dropout_factors(kP, {32, 32}); };
  const Tensor x = batch(), dy = torch::randn_like(x);
  {
    modules::TransformerLayer layer(
        modules::TransformerLayerOptions(32, 4).ffn(64).projection_dropout(kP).mlp_dropout(kP));
    adapt(*layer);
    torch::manual_seed(3);
    const Pass found = fused_pass(*layer, x, dy);
    torch::manual_seed(3);
    const DroppedElements of_layer{dropped(), dropped()};
    CHECK(largest_error(found, reference_pass(*layer, x, dy, of_layer)) < kRounding);
    CHECK_FALSE(fused_pass(*layer, x, dy).y.equal(found.y));  // another seed
  }
  {
    modules::LayerNormMlp mlp(modules::LayerNormMlpOptions(32, 64).dropout(kP));
    adapt(*mlp);
    torch::manual_seed(3);
    const Pass found = fused_pass(*mlp, x, dy);
    torch::manual_seed(3);
    CHECK(largest_error(found, reference_pass(*mlp, x, dy, {{}, dropped()})) < kRounding);
  }
  modules::LayerNormLinear linear(32, 32);
  adapt(*linear, of_rank_3().dropout(kP));
  torch::manual_seed(3);
  const Pass found = fused_pass(*linear, x, dy);
  torch::manual_seed(3);
  const Tensor factors = dropped().view(x.sizes());
  const Pass wanted = pass(
      *linear,
      [&](const Tensor& in) {
        const Tensor rows = norm_of(linear->norm, in.to(at::kDouble));
        const modules::LoraAdapter adapter = linear->linear->active_adapters().at(0);
        return at::linear(rows, linear->linear->weight.to(at::kDouble),
                          linear->linear->bias.to(at::kDouble)) +
               adapter->scale() * at::linear(at::linear(rows * factors, adapter->A.to(at::kDouble)),
                                             adapter->B.to(at::kDouble));
      },
      x, dy);
  CHECK(largest_error(found, wanted) < kRounding);

  for_all_layers([&](auto layer) {
    CAPTURE(layer->name());
    adapt(*layer, of_rank_3().dropout(kP));
    const Tensor direction = torch::randn_like(layer->forward(x));
    torch::manual_seed(3);
    const Pass once = fused_pass(*layer, x, direction);
    torch::manual_seed(3);
    CHECK(largest_error(recomputed_pass(*layer, x, direction), once) == 0);
    CHECK_FALSE(layer->forward(x).equal(once.y));
    layer->eval();
    CHECK(largest_error(fused_pass(*layer, x, direction), reference_pass(*layer, x, direction)) < kRounding);
  });
}

TEST_CASE("in 8 bits fused layers with adapters are as exact as their parts one by one",
          "[modules][fused][lora][nf4][fp8]") {
  for (const bool quantized : {false, true}) {
    for_all_layers([&](auto layer) {
      CAPTURE(layer->name(), quantized);
      randomize(*layer);
      if (quantized) modules::quantize(*layer, in_4_bits());
      modules::add_lora(*layer, of_rank_3());
      for (const auto& item : modules::trainable(*layer)) {
        const torch::NoGradGuard no_grad;
        item.value().normal_(0, 0.2);
      }
      const auto options = Fp8Options().recipe(Fp8Recipe::current).quantized_weights(quantized);
      const auto ours = std::make_shared<Fp8Scaling>(*layer, options);
      const auto theirs = std::make_shared<Fp8Scaling>(*layer, options);
      const Tensor x = batch(), dy = torch::randn_like(layer->forward(x));
      const Pass exact = reference_pass(*layer, x, dy);
      const auto of_parts = [&](const Tensor& t) { return reference(*layer, t); };
      for (const bool autocast : {true, false}) {
        CAPTURE(autocast);
        std::optional<Autocast> on;
        if (autocast) on.emplace(at::kCPU);
        Pass found, parts;
        {
          const Fp8Scope scope(ours);
          found = fused_pass(*layer, x, dy);
        }
        {
          const Fp8Scope scope(theirs);
          parts = pass(*layer, of_parts, x, dy);
        }
        CHECK(relative_error(found.y, exact.y) <= 1.1 * relative_error(parts.y, exact.y));
        CHECK(relative_error(found.y, exact.y) > 0.003);  // it did compute in 8 bits
        CHECK(largest_error(found, exact) <= 1.3 * largest_error(parts, exact));
      }
      CHECK(ours->other_calls() == 0);
    });
  }
}

TEST_CASE("fused layers with adapters take no rows, clone, and have no second derivative",
          "[modules][fused][lora][nf4][errors]") {
  for (const bool quantized : {false, true}) {
    for_all_layers([&](auto layer) {
      CAPTURE(layer->name(), quantized);
      if (quantized) modules::quantize(*layer, in_4_bits());
      modules::add_lora(*layer, of_rank_3());
      for (const auto& item : modules::trainable(*layer)) {
        const torch::NoGradGuard no_grad;
        item.value().normal_(0, 0.2);
      }
      const Tensor y = layer->forward(torch::zeros({0, 16, 32}).requires_grad_());
      CHECK(y.size(0) == 0);
      y.sum().backward();
      for (const auto& item : modules::trainable(*layer)) {
        CHECK(item.value().grad().equal(torch::zeros_like(item.value())));
      }
      using Impl = typename decltype(layer)::ContainedType;
      const auto clone = std::dynamic_pointer_cast<Impl>(layer->clone());
      // LibTorch's clone freezes none of its own norms.
      const auto trained = modules::trainable(*layer), of_clone = modules::trainable(*clone);
      for (const auto& item : trained) CHECK(of_clone.contains(item.key()));
      CHECK((of_clone.size() == trained.size() || layer->options.normalization() == Normalization::layer));
      const Tensor wanted = layer->forward(batch());
      CHECK(clone->forward(batch()).equal(wanted));
      for (const auto& item : of_clone) {
        const torch::NoGradGuard no_grad;
        item.value().zero_();
      }
      CHECK_FALSE(clone->forward(batch()).equal(wanted));
      CHECK(layer->forward(batch()).equal(wanted));

      CHECK_THROWS_WITH(layer->forward(torch::zeros({2, 16, 31})), ContainsSubstring("[2, 16, 31]"));
      CHECK_THROWS_WITH(layer->forward(torch::zeros({2, 16, 32}, at::kDouble)),
                        ContainsSubstring("not in Double; cast its input"));
      const Tensor x = batch().requires_grad_();
      const Tensor z = layer->forward(x);
      CHECK_THROWS_WITH(torch::autograd::grad({z.sum()}, {x}, {}, std::nullopt, /*create_graph=*/true),
                        ContainsSubstring("no second derivative"));
    });
  }
}

TEST_CASE("the loss of a CausalLm with adapters and 4 bits is that of its formula",
          "[modules][causal_lm][lora]") {
  for (const bool quantized : {false, true}) {
    for (const int kind : {0, 1, 2}) {  // as Llama 3, Qwen2 and Qwen3 are, small
      CAPTURE(quantized, kind);
      auto options = modules::CausalLmOptions(48, 32, 2, 4).ffn(64).kv_heads(2).theta(kTheta).eps(1e-4);
      if (kind == 1) options.qkv_bias(true).kv_heads(1).tied(true);
      if (kind == 2) options.qk_norm(true).head_dim(16);
      modules::CausalLm model(options);
      randomize(*model);
      if (quantized) modules::quantize(*model, Nf4Options().targets({"layers.**"}));
      const auto names = modules::add_lora(*model, of_rank_3());
      CHECK(names.size() == 2 * 4);
      CHECK(names.front() == "layers.0.qkv.linear");
      CHECK(names.back() == "layers.1.mlp.fc2");
      const auto trained = modules::trainable(*model);
      for (const auto& item : trained) {
        const torch::NoGradGuard no_grad;
        item.value().normal_(0, 0.2);
      }
      torch::manual_seed(3);
      const Tensor text = torch::randint(48, {2, 13}, torch::kLong);
      const Tensor ids = text.narrow(1, 0, 12), targets = text.narrow(1, 1, 12);
      Tensor x = model->embedding->weight.to(at::kDouble).index({ids});
      for (const auto& layer : *model->layers) x = reference(*layer->as<modules::TransformerLayerImpl>(), x);
      const Tensor logits = at::linear(norm_of(model->norm, x), model->head_weight().to(at::kDouble));
      const Tensor wanted = torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
      const Tensor loss = model->loss(ids, targets);
      CHECK(relative_error(loss, wanted) < 1e-5);
      CHECK(relative_error(model->forward(ids), logits) < 1e-5);
      const auto found = torch::autograd::grad({loss}, trained.values());
      const auto expected = torch::autograd::grad({wanted}, trained.values());
      for (size_t i = 0; i < found.size(); ++i) {
        CAPTURE(trained.keys()[i]);
        CHECK(relative_error(found[i], expected[i]) < 2e-5);
      }
      // Drawing the matrices anew leaves adapters alone.
      const Tensor before = trained.values()[1].detach().clone();
      model->reset_parameters();
      CHECK(trained.values()[1].equal(before));
    }
  }
}

}  // namespace pacer::testing::fused_layers
