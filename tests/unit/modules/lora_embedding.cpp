// Embeddings that take adapters: LibTorch's to the bit without one; with one, results and gradients beside
// LibTorch's own operations in fp64, merging, and what is refused.
#include "support/catch.h"

#include <cmath>

#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>

#include <pacer/core/error.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/lora.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"

namespace pacer::testing::lora_embedding {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using torch::Tensor;
using Options = torch::nn::EmbeddingOptions;

Tensor some_indices() { return torch::tensor({{1, 4, 2}, {0, 4, 6}}, at::kLong); }

modules::Embedding adapted(const Options& options, const LoraOptions& lora) {
  modules::Embedding layer(options);
  layer->add_adapter(lora);
  const torch::NoGradGuard no_grad;
  layer->adapter("default")->A.normal_(0, 0.3);
  layer->to(at::kDouble);
  return layer;
}

}  // namespace

TEST_CASE("an embedding without adapters is LibTorch's to the bit", "[lora]") {
  const Tensor given = torch::randn({7, 5});
  for (const Options& options :
       {Options(7, 5), Options(7, 5).padding_idx(2), Options(7, 5).padding_idx(-1),
        Options(7, 5).max_norm(1.5), Options(7, 5).scale_grad_by_freq(true), Options(7, 5).sparse(true)}) {
    torch::manual_seed(4);
    torch::nn::Embedding wanted(options);
    torch::manual_seed(4);
    modules::Embedding layer(options);
    REQUIRE(layer->named_parameters().keys() == wanted->named_parameters().keys());
    CHECK(layer->weight.equal(wanted->weight));
    CHECK(layer->options.padding_idx() == wanted->options.padding_idx());
    const Tensor y = layer(some_indices()), twin = wanted(some_indices());
    CHECK(y.equal(twin));
    CHECK(layer->weight.equal(wanted->weight));
    y.square().sum().backward();
    twin.square().sum().backward();
    CHECK(layer->weight.grad().is_sparse() == wanted->weight.grad().is_sparse());
    CHECK(layer->weight.grad().to_dense().equal(wanted->weight.grad().to_dense()));
  }
  modules::Embedding from_given(Options(7, 5)._weight(given.clone()));
  CHECK(from_given->weight.equal(given));
  const auto copy = std::dynamic_pointer_cast<modules::EmbeddingImpl>(from_given->clone());
  CHECK(copy->weight.equal(given));
  {
    const torch::NoGradGuard no_grad;
    copy->weight.zero_();
  }
  CHECK(from_given->weight.equal(given));
}

TEST_CASE("results and gradients of an embedding's adapter are those of LibTorch's in fp64", "[lora]") {
  for (const bool by_frequency : {false, true}) {
    torch::manual_seed(3);
    auto layer =
        adapted(Options(7, 5).padding_idx(2).scale_grad_by_freq(by_frequency), LoraOptions(4).alpha(6));
    const modules::LoraAdapter adapter = layer->adapter("default");
    REQUIRE(adapter->A.sizes() == at::IntArrayRef({4, 7}));
    REQUIRE(adapter->B.sizes() == at::IntArrayRef({5, 4}));
    const Tensor indices = some_indices(), direction = torch::randn({2, 3, 5}, at::kDouble);
    const Tensor y = layer(indices);
    const Tensor flat = indices.flatten();
    const Tensor wanted = (layer->weight.index_select(0, flat) +
                           1.5 * adapter->A.index_select(1, flat).t().matmul(adapter->B.t()))
                              .view({2, 3, 5});
    CHECK((y - wanted).abs().max().item<double>() < 1e-12);
    const std::vector<Tensor> inputs = {layer->weight, adapter->A, adapter->B};
    const auto found = torch::autograd::grad({(y * direction).sum()}, inputs);
    auto expected = torch::autograd::grad({(wanted * direction).sum()}, inputs);
    expected[0][2].zero_();  // the padding index
    expected[1].select(1, 2).zero_();
    if (by_frequency) {  // 4 occurs twice
      expected[0][4] /= 2;
      expected[1].select(1, 4) /= 2;
    }
    for (size_t i = 0; i < found.size(); ++i) {
      CAPTURE(i);
      CHECK(expected[i].abs().max().item<double>() > 1e-3);
      CHECK((found[i] - expected[i]).abs().max().item<double>() < 1e-10);
    }
  }
}

TEST_CASE("a new adapter of an embedding begins as PEFT's and changes nothing", "[lora]") {
  torch::manual_seed(2);
  modules::Embedding layer(50, 40);
  torch::nn::ModuleList model(layer);
  const Tensor before = layer(some_indices());
  CHECK(modules::add_lora(*model, LoraOptions(30).targets({"0"}).dropout(0.5)) ==
        std::vector<std::string>{"0"});
  CHECK(layer(some_indices()).equal(before));
  CHECK(modules::trainable(*model).keys() ==
        std::vector<std::string>{"0.lora_default.A", "0.lora_default.B"});
  const modules::LoraAdapter adapter = layer->adapter("default");
  CHECK(adapter->A.count_nonzero().item<int64_t>() == 0);
  CHECK(std::abs(adapter->B.mean().item<double>()) < 0.1);
  CHECK(std::abs(adapter->B.std().item<double>() - 1) < 0.1);
  {
    const torch::NoGradGuard no_grad;
    adapter->A.normal_();
  }
  CHECK(layer(some_indices()).equal(layer(some_indices())));  // indices are not dropped
}

TEST_CASE("an embedding with an adapter has the weight's dtype, under autocast, too", "[lora]") {
  torch::manual_seed(5);
  auto layer = adapted(Options(7, 5), LoraOptions(2));
  const Tensor wanted = layer(some_indices());
  layer->to(at::kFloat);
  const auto is_near = [&](const Tensor& y, at::ScalarType dtype) {
    CHECK(y.scalar_type() == dtype);
    CHECK((y.to(at::kDouble) - wanted).norm().item<double>() < 0.01 * wanted.norm().item<double>());
  };
  {
    const Autocast autocast(at::kCPU);
    is_near(layer(some_indices()), at::kFloat);
  }
  layer->weight.set_data(layer->weight.to(at::kBFloat16));
  is_near(layer(some_indices()), at::kBFloat16);
}

TEST_CASE("a merged embedding computes what its adapter added, and unmerge brings back every byte",
          "[lora]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    torch::manual_seed(7);
    auto layer = adapted(Options(7, 5), LoraOptions(3).alpha(2));
    layer->to(dtype);
    torch::nn::ModuleList model(layer);
    const modules::LoraAdapter adapter = layer->adapter("default");
    const Tensor before = layer->weight.detach().clone(), beside = layer(some_indices());
    const Tensor sum =
        before.to(at::kDouble) +
        adapter->scale() * adapter->A.to(at::kDouble).t().matmul(adapter->B.to(at::kDouble).t());
    modules::merge(*model);
    CHECK(torch::allclose(layer->weight.to(at::kDouble), sum, dtype == at::kBFloat16 ? 0.004 : 1e-12, 1e-12));
    CHECK(
        layer(some_indices()).equal(layer->weight.index_select(0, some_indices().flatten()).view({2, 3, 5})));
    const auto copy = std::dynamic_pointer_cast<modules::EmbeddingImpl>(layer->clone());
    copy->unmerge();
    CHECK(copy->weight.equal(before));
    modules::unmerge(*model);
    CHECK(layer->weight.equal(before));
    CHECK(layer(some_indices()).equal(beside));
  }
}

TEST_CASE("what an embedding cannot have is refused by name, and nothing has changed", "[lora]") {
  modules::Embedding plain(7, 5), renormed(Options(7, 5).max_norm(1)), sparse(Options(7, 5).sparse(true));
  torch::nn::ModuleList model;
  model->push_back(plain);
  model->push_back(renormed);
  model->push_back(sparse);
  model->push_back(torch::nn::Embedding(7, 5));
  const auto refused = [&](const char* target, const char* reason) {
    CHECK_THAT(message_of<InvalidArgument>([&] {
                 modules::add_lora(*model, LoraOptions(2).targets({"0", target}));
               }),
               ContainsSubstring(reason));
    CHECK(modules::adapters(*model).empty());
    CHECK(plain->weight.requires_grad());
  };
  refused("1", "add_lora: 1 changes its vectors in forward (max_norm)");
  refused("2", "add_lora: 2 has sparse gradients");
  refused("3", "3 is a torch::nn::Embedding, build the model of pacer::modules::Embedding");
  model->register_module("tied", modules::Embedding(7, 5));
  model->named_children()["tied"]->as<modules::Embedding>()->weight =
      model->named_children()["tied"]->register_parameter("other", plain->weight);
  refused("0", "the weight of 0 is also tied.other");
  CHECK_THROWS_WITH(modules::Embedding(Options(7, 5).padding_idx(7)), ContainsSubstring("padding_idx"));
  CHECK_THROWS_WITH(modules::Embedding(Options(7, 5).padding_idx(-8)), ContainsSubstring("none of its 7"));
  CHECK_THROWS_WITH(modules::Embedding(Options(7, 5)._weight(torch::zeros({5, 7}))),
                    ContainsSubstring("another shape"));
}

}  // namespace pacer::testing::lora_embedding
