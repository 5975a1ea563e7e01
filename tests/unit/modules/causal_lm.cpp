// CausalLm beside LibTorch's functions: logits, loss and gradients, what it starts from, and what is counted of it.
// tests/examples/causal_lm_files.py compares it with transformers' classes.
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/functional/loss.h>

#include <pacer/modules/causal_lm.h>
#include <pacer/optimizers/fused_adam.h>

#include "support/kernels/fused_reference.h"

namespace pacer::testing::fused_layers {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::CausalLm;
using modules::CausalLmOptions;

constexpr int64_t kIds = 48;

// As Llama 3, Qwen2 and Qwen3 are, small.
std::vector<CausalLmOptions> decoders() {
  const auto common = CausalLmOptions(kIds, 32, 2, 4).ffn(64).kv_heads(2).theta(kTheta).eps(1e-4);
  return {common, CausalLmOptions(common).qkv_bias(true).kv_heads(1).tied(true),
          CausalLmOptions(common).qk_norm(true).head_dim(16)};
}

Tensor some_ids(int64_t length = 12, uint64_t seed = 3) {
  torch::manual_seed(seed);
  return torch::randint(kIds, {2, length}, torch::kLong);
}

// The logits in fp64.
Tensor reference_logits(CausalLm& model, const Tensor& ids) {
  Tensor x = model->embedding->weight.to(at::kDouble).index({ids});
  for (const auto& layer : *model->layers) {
    auto& of_model = *layer->as<modules::TransformerLayerImpl>();
    REQUIRE(of_model.options.rotary());
    x = reference(of_model, x);
  }
  return at::linear(norm_of(model->norm, x), model->head_weight().to(at::kDouble));
}

std::map<std::string, Tensor> gradients(torch::nn::Module& model, const Tensor& loss) {
  model.zero_grad();
  loss.backward();
  std::map<std::string, Tensor> found;
  for (const auto& item : model.named_parameters()) found[item.key()] = item.value().grad().clone();
  return found;
}

void check_gradients(const std::map<std::string, Tensor>& found,
                     const std::map<std::string, Tensor>& wanted) {
  REQUIRE(found.size() == wanted.size());
  for (const auto& [name, gradient] : wanted) {
    CAPTURE(name);
    CHECK(relative_error(found.at(name), gradient) < 1e-5);
  }
}

}  // namespace

TEST_CASE("logits of a CausalLm and their gradients are their formula", "[modules][causal_lm]") {
  for (const CausalLmOptions& options : decoders()) {
    CausalLm model(options);
    randomize(*model);
    const Tensor ids = some_ids(), logits = model(ids), wanted = reference_logits(model, ids);
    CHECK(logits.sizes() == at::IntArrayRef({2, 12, kIds}));
    CHECK(relative_error(logits, wanted) < 1e-5);
    CHECK(relative_error(model->hidden_states(ids).matmul(model->head_weight().t()), wanted) < 1e-5);
    const Tensor upstream = torch::randn_like(logits);
    const auto found = gradients(*model, (logits * upstream).sum());
    check_gradients(found, gradients(*model, (wanted * upstream).sum()));
  }
}

TEST_CASE("the loss of a CausalLm is the cross entropy of its logits", "[modules][causal_lm]") {
  for (const CausalLmOptions& options : decoders()) {
    CausalLm model(options);
    randomize(*model);
    const Tensor ids = some_ids(), targets = some_ids(12, 4);
    targets[1].slice(0, 7) = 5;
    for (const int64_t ignored : {int64_t{-100}, int64_t{5}}) {
      const Tensor wanted = torch::nn::functional::cross_entropy(
          model(ids).flatten(0, 1), targets.flatten(),
          torch::nn::functional::CrossEntropyFuncOptions().ignore_index(ignored));
      const auto loss_options = modules::LinearCrossEntropyOptions().ignore_index(ignored);
      const Tensor loss = model->loss(ids, targets, loss_options);
      CHECK(relative_error(loss, wanted) < 1e-6);
      const auto of_loss = gradients(*model, loss);
      check_gradients(of_loss, gradients(*model, wanted));
      Tensor x = model->embed(ids);
      for (size_t i = 0; i < model->layers->size(); ++i) x = model->run_layer(i, x);
      CHECK(model->loss_behind_layers(x, targets, loss_options).equal(loss));
    }
  }
}

TEST_CASE("a CausalLm starts from one deviation, biases of 0 and norms of 1", "[modules][causal_lm]") {
  torch::manual_seed(9);
  CausalLm model(CausalLmOptions(512, 64, 2, 4).qkv_bias(true).qk_norm(true).init_std(0.03));
  for (const auto& item : model->named_parameters()) {
    CAPTURE(item.key());
    if (item.value().dim() == 2) {  // at least 64 * 64 draws: four deviations of their deviation
      CHECK(item.value().std().item<double>() == Approx(0.03).epsilon(4 / std::sqrt(2.0 * 64 * 64)));
    } else {
      CHECK(item.value().eq(item.key().find("bias") == std::string::npos ? 1 : 0).all().item<bool>());
    }
  }
  const Tensor before = model->head->weight.clone();
  torch::manual_seed(9);
  CausalLm again(model->options);
  CHECK(again->head->weight.equal(before));
  model->reset_parameters();
  CHECK_FALSE(model->head->weight.equal(before));
}

TEST_CASE("the parameters of a CausalLm stand in the order of their use", "[modules][causal_lm]") {
  const std::vector<std::string> of_layer = {"qkv.norm.weight", "qkv.linear.weight", "projection.weight",
                                             "mlp.norm.weight", "mlp.fc1.weight",    "mlp.fc2.weight"};
  std::vector<std::string> names = {"embedding.weight"};
  for (const char* layer : {"layers.0.", "layers.1."}) {
    for (const std::string& name : of_layer) names.push_back(layer + name);
  }
  names.emplace_back("norm.weight");
  CHECK(CausalLm(CausalLmOptions(kIds, 32, 2, 4).tied(true))->named_parameters().keys() == names);
  names.emplace_back("head.weight");
  CHECK(CausalLm(CausalLmOptions(kIds, 32, 2, 4))->named_parameters().keys() == names);
  CHECK(CausalLmOptions(kIds, 32, 2, 4).ffn() == 128);  // 85.3
  CHECK(CausalLmOptions(kIds, 4096, 2, 4).ffn() == 10944);
  CHECK(CausalLmOptions(kIds, 48, 2, 4).ffn() == 128);
}

TEST_CASE("a copy of a CausalLm has weights of its own and shares positions", "[modules][causal_lm]") {
  for (const CausalLmOptions& options : decoders()) {
    CausalLm model(options);
    randomize(*model);
    const auto copy = std::dynamic_pointer_cast<modules::CausalLmImpl>(model->clone());
    const Tensor ids = some_ids(), logits = model(ids);
    CHECK(copy->forward(ids).equal(logits));
    model->rotary.set_offset(3);
    CHECK(relative_error(model(ids), logits) < 1e-5);  // only how far tokens are apart counts
    CHECK(model->layers[0]->as<modules::TransformerLayerImpl>()->options.rotary()->offset() == 3);
    CHECK(copy->forward(ids).equal(model(ids)));
    model->rotary.set_offset(0);
    torch::NoGradGuard no_grad;
    for (Tensor& parameter : model->parameters()) parameter.zero_();
    CHECK(copy->forward(ids).equal(logits));
  }
}

TEST_CASE("a CausalLm looks no further back than its window", "[modules][causal_lm][window]") {
  AttentionWindow window;
  CausalLm model(decoders().front().window(window));
  randomize(*model);
  const Tensor ids = some_ids();
  Tensor others = ids.clone();
  others.narrow(1, 0, 4) = 7;
  CHECK(relative_error(model(others).slice(1, 4), model(ids).slice(1, 4)) > 1e-3);
  window.set_length(4);
  CHECK(model(others).slice(1, 4).equal(model(ids).slice(1, 4)));
}

TEST_CASE("operations of a CausalLm are those of its products, six for each weight", "[modules][causal_lm]") {
  for (const CausalLmOptions& options : decoders()) {
    const CausalLm model(options);
    double weights = 0;
    for (const auto& item : model->named_parameters()) {
      const bool is_looked_up = item.key() == "embedding.weight" && !options.tied();
      if (item.value().dim() == 2 && !is_looked_up) weights += static_cast<double>(item.value().numel());
    }
    // Scores and what they weigh: two products of [sequence, head_dim] for a token and head, each a multiplication and an
    // addition, in forward and twice in backward.
    const double head_dim = options.qk_norm() ? 16 : 8, of_attention = 2 * 2 * 100 * head_dim * 4 * 3;
    CHECK(model->operations_per_token(100) == 6 * weights + 2 * of_attention);
  }
  CHECK_THROWS_WITH(CausalLm(decoders().front())->operations_per_token(0),
                    ContainsSubstring("above 0, not 0"));
}

TEST_CASE("a CausalLm refuses what cannot be", "[modules][causal_lm][errors]") {
  const CausalLmOptions options(kIds, 32, 2, 4);
  const auto with = [&](const auto& change) {
    CausalLmOptions changed = options;
    change(changed);
    return CausalLm(changed);
  };
  CHECK_THROWS_WITH(with([](auto& o) { o.vocabulary(0); }),
                    ContainsSubstring("vocabulary and layers must be above 0, not 0 and 2"));
  CHECK_THROWS_WITH(with([](auto& o) { o.layers(-1); }), ContainsSubstring("not 48 and -1"));
  CHECK_THROWS_WITH(CausalLm(CausalLmOptions(kIds, 0, 2, 4)), ContainsSubstring("hidden and heads"));
  CHECK_THROWS_WITH(with([](auto& o) { o.ffn(0); }), ContainsSubstring("ffn must be above 0, not 0"));
  CHECK_THROWS_WITH(with([](auto& o) { o.init_std(-1); }), ContainsSubstring("init_std"));
  CHECK_THROWS_WITH(with([](auto& o) { o.init_std(NAN); }), ContainsSubstring("init_std"));
  CHECK_THROWS_WITH(with([](auto& o) { o.theta(0); }), ContainsSubstring("theta"));
  CHECK_THROWS_WITH(with([](auto& o) { o.kv_heads(3); }), ContainsSubstring("kv_heads must divide heads"));
  CHECK_THROWS_WITH(with([](auto& o) { o.head_dim(7); }), ContainsSubstring("even number of channels"));
  CausalLm model(options);
  CHECK_THROWS_WITH(model(some_ids()[0]), ContainsSubstring("CausalLm takes ids [batch, sequence] in Long"));
  CHECK_THROWS_WITH(model(some_ids().to(at::kInt)), ContainsSubstring("not Int of shape [2, 12]"));
  CHECK_THROWS_WITH(model->loss(some_ids(), some_ids().narrow(1, 0, 11)), ContainsSubstring("targets"));
}

// The formula computes in fp64 and its gradients are fp32, so each step differs by a rounding; AdamW makes full steps of
// gradients near zero, which is what the bound is for.
TEST_CASE("two hundred steps of a CausalLm have the losses of its formula", "[modules][causal_lm]") {
  for (const CausalLmOptions& options : decoders()) {
    CausalLm fused(options);
    randomize(*fused);
    CausalLm plain(std::dynamic_pointer_cast<modules::CausalLmImpl>(fused->clone()));
    FusedAdamW of_fused(fused->named_parameters(), FusedAdamWOptions(2e-3));
    FusedAdamW of_plain(plain->named_parameters(), FusedAdamWOptions(2e-3));
    double first = 0, last = 0, largest = 0;
    for (uint64_t step = 0; step < 200; ++step) {
      const Tensor text = some_ids(13, step % 4);
      const Tensor ids = text.narrow(1, 0, 12).contiguous(), targets = text.narrow(1, 1, 12).contiguous();
      const Tensor loss = fused->loss(ids, targets);
      const Tensor wanted =
          torch::nn::functional::cross_entropy(reference_logits(plain, ids).flatten(0, 1), targets.flatten());
      for (FusedAdamW* optimizer : {&of_fused, &of_plain}) optimizer->zero_grad();
      loss.backward(), wanted.backward();
      of_fused.step(), of_plain.step();
      last = wanted.item<double>();
      if (step == 0) first = last;
      largest = std::max(largest, std::abs(loss.item<double>() - last));
    }
    CHECK(last < 0.2 * first);
    CHECK(largest < 1e-4 * first);
  }
}

}  // namespace pacer::testing::fused_layers
