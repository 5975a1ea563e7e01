// The backward pass in two halves against the whole one, over graphs of many kinds: gradients to the bit,
// nothing computed twice, hooks once.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/split_backward.h>
#include <pacer/modules/transformer_layer.h>

#include "support/catch.h"
#include "support/modules/autocast.h"
#include "support/modules/call_counts.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/stages.h"

namespace pacer::testing::stages {
namespace {

// A custom function that computes all of its gradients at once, whatever is asked of it.
struct ScaledProduct : torch::autograd::Function<ScaledProduct> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight) * 2;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor rows = saved[0].reshape({-1, saved[0].size(-1)}),
                 dy = gradients[0].reshape({-1, gradients[0].size(-1)});
    return {gradients[0].matmul(saved[1].t()) * 2, rows.t().mm(dy) * 2};
  }
};

struct Outcome {
  std::vector<Tensor> inputs, parameters;
  std::vector<int> hooks;  // how often each parameter's hook ran
  int64_t products = 0, norms = 0, attentions = 0;
};

// Counts, while it exists, how often each parameter's gradient arrives.
class HookCounts {
 public:
  explicit HookCounts(const Module& module)
      : parameters_(module.parameters()), counts_(std::make_shared<std::vector<int>>(parameters_.size())) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].requires_grad()) continue;
      detail::add_gradient_hook(parameters_[i], counts_,
                                [counts = counts_.get(), i](const Tensor&) { ++(*counts)[i]; });
    }
  }
  HookCounts(const HookCounts&) = delete;
  ~HookCounts() {
    for (const Tensor& parameter : parameters_) {
      if (parameter.requires_grad()) detail::remove_gradient_hook(parameter, counts_.get());
    }
  }
  const std::vector<int>& counts() const { return *counts_; }

 private:
  std::vector<Tensor> parameters_;
  std::shared_ptr<std::vector<int>> counts_;
};

enum class Way {
  whole,
  halves,
  all_first_halves_first,  // and then all second ones
};

Outcome train(const Stage& stage, Way way, int micro_batches = 1) {
  stage.module->zero_grad();
  torch::manual_seed(7);
  const HookCounts hooks(*stage.module);
  const CallCounts calls;
  Outcome outcome;
  std::vector<SplitBackward> waiting;
  int64_t before = 0;
  for (int i = 0; i < micro_batches; ++i) {
    Tensors x;
    for (const auto& sizes : stage.inputs) x.push_back(torch::randn(sizes).requires_grad_());
    Tensors y;
    {
      const auto cast = stage.autocast ? std::make_unique<Autocast>(at::kCPU) : nullptr;
      y = stage.forward(x);
    }
    Tensors dy, roots, seeds;
    for (const Tensor& output : y) {
      dy.push_back(output.defined() ? torch::randn_like(output.detach()) : Tensor());
      if (!output.defined() || !output.requires_grad()) continue;
      roots.push_back(output);
      seeds.push_back(dy.back());
    }
    before += calls.products();
    if (way == Way::whole) {
      torch::autograd::backward(roots, seeds);
      for (const Tensor& input : x) outcome.inputs.push_back(input.grad());
      continue;
    }
    SplitBackward backward(y, x);
    roots.clear();
    y.clear();
    const std::vector<int> at_first = hooks.counts();
    for (Tensor& gradient : backward.input_half(dy)) outcome.inputs.push_back(std::move(gradient));
    REQUIRE(hooks.counts() == at_first);
    for (const Tensor& input : x) REQUIRE_FALSE(input.grad().defined());
    if (way == Way::halves) {
      backward.weight_half();
    } else {
      waiting.push_back(std::move(backward));
    }
  }
  for (SplitBackward& backward : waiting) backward.weight_half();
  for (const Tensor& parameter : stage.module->parameters())
    outcome.parameters.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  outcome.hooks = hooks.counts();
  outcome.products = calls.products();
  outcome.norms = calls.of({"aten::native_layer_norm_backward"});
  outcome.attentions = calls.of({"aten::_scaled_dot_product_flash_attention_for_cpu_backward"});
  return outcome;
}

void require_same_outcome(const Outcome& wanted, const Outcome& found) {
  require_same(wanted.inputs, found.inputs);
  require_same(wanted.parameters, found.parameters);
  REQUIRE(wanted.hooks == found.hooks);
  REQUIRE(wanted.products == found.products);
  REQUIRE(wanted.norms == found.norms);
  REQUIRE(wanted.attentions == found.attentions);
}

// A stage with the parameters of one block.
template <class Function>
Stage with_block(Function f, bool autocast = false, Block block = Block()) {
  return {block.ptr(),
          [block, f](const Tensors& x) mutable { return Tensors{f(block, x[0])}; },
          {{kBatch, kLength, kSize}},
          autocast};
}

struct NamedStage {
  std::string name;
  std::function<Stage()> make;
};

template <class Function>
Stage with_parameters(std::vector<std::vector<int64_t>> sizes, Function f,
                      std::vector<std::vector<int64_t>> inputs = {{kBatch, kLength, kSize}}) {
  auto module = std::make_shared<ParametersImpl>(std::move(sizes));
  return {module, [p = module->p, f](const Tensors& x) { return f(x, p); }, std::move(inputs)};
}

const std::vector<NamedStage>& all_stages() {
  const std::vector<int64_t> matrix = {kSize, kSize}, vector = {kSize};
  static const std::vector<NamedStage> table = {
      {"three blocks", [] { return three_blocks(); }},
      {"three blocks with dropout", [] { return three_blocks(0.2); }},
      {"three blocks under autocast", [] { return three_blocks(0, true); }},
      {"a block used twice", [] { return with_block([](Block& b, const Tensor& x) { return b(b(x)); }); }},
      {"a block used twice under autocast",
       [] { return with_block([](Block& b, const Tensor& x) { return b(b(x)); }, /*autocast=*/true); }},
      {"a block used five times",
       [] { return with_block([](Block& b, const Tensor& x) { return b(b(b(b(b(x))))); }); }},
      {"tied weights, once transposed and once in a norm",
       [=] {
         return with_parameters({matrix, vector}, [](const Tensors& x, const Tensors& p) {
           const Tensor h = at::gelu(x[0].matmul(p[0]) + p[1]);
           return Tensors{h.matmul(p[0].t()) * p[0].square().mean() + p[1].sin()};
         });
       }},
      {"frozen parameters",
       [] {
         Block block;
         for (const Tensor& p : {block->up->weight, block->norm1->bias, block->out->weight})
           p.set_requires_grad(false);
         return with_block([](Block& b, const Tensor& x) { return b(x); }, false, block);
       }},
      {"all parameters frozen",
       [] {
         Block block;
         for (const Tensor& p : block->parameters()) p.set_requires_grad(false);
         return with_block([](Block& b, const Tensor& x) { return b(x); }, false, block);
       }},
      {"an embedding that joins",
       [] {
         torch::nn::Embedding table(11, kSize);
         torch::nn::Linear mix(kSize, kSize);
         Block block;
         auto module = std::make_shared<ParametersImpl>(std::vector<std::vector<int64_t>>());
         module->register_module("table", table);
         module->register_module("mix", mix);
         module->register_module("block", block);
         return Stage{
             module, [=](const Tensors& x) mutable {
               const Tensor tokens = torch::arange(kBatch * kLength).remainder(11).view({kBatch, kLength});
               return Tensors{block(x[0] + mix(table(tokens)))};
             }};
       }},
      {"a recomputed block",
       [] {
         return with_block(
             [](Block& b, const Tensor& x) { return b(recompute(*b, &BlockImpl::forward, x)); });
       }},
      {"pacer's transformer layer",
       [] {
         modules::TransformerLayer layer(modules::TransformerLayerOptions(kSize, kHeads).dropout(0.1));
         return Stage{layer.ptr(), [layer](const Tensors& x) mutable { return Tensors{layer(x[0])}; }};
       }},
      {"a layer of a language model",
       [] {
         modules::TransformerLayer layer(modules::TransformerLayerOptions(kSize, kHeads)
                                             .normalization(Normalization::rms)
                                             .activation(Activation::swiglu)
                                             .bias(false)
                                             .causal(true)
                                             .kv_heads(1)
                                             .rotary(100)
                                             .qk_norm(true));
         return Stage{layer.ptr(), [layer](const Tensors& x) mutable { return Tensors{layer(x[0])}; }};
       }},
      {"pacer's linear layer",
       [] {
         modules::Linear layer(kSize, kSize);
         return Stage{layer.ptr(),
                      [layer](const Tensors& x) mutable { return Tensors{layer(at::gelu(layer(x[0])))}; }};
       }},
      {"a custom function twice, with a plain product of the same weight",
       [=] {
         return with_parameters({matrix}, [](const Tensors& x, const Tensors& p) {
           const Tensor h = ScaledProduct::apply(x[0], p[0]).matmul(p[0]);
           return Tensors{ScaledProduct::apply(h, p[0]).matmul(p[0])};
         });
       }},
      {"several inputs and outputs, some without gradient",
       [=] {
         return with_parameters({matrix, vector, matrix},
                                [](const Tensors& x, const Tensors& p) {
                                  const Tensor a = x[0].matmul(p[0]), b = x[1].matmul(p[2]) + p[1];
                                  return Tensors{a * b, Tensor(), b.detach(), p[1] * 2, b, a.sum(), p[2], b};
                                },
                                {{kBatch, kLength, kSize}, {kLength, kSize}, {3}});
       }},
      {"no inputs",
       [=] {
         return with_parameters({matrix, vector},
                                [](const Tensors&, const Tensors& p) {
                                  return Tensors{p[0].mm(p[0]).matmul(p[1]), p[1]};
                                },
                                {});
       }},
      {"an unused parameter",
       [=] {
         return with_parameters({matrix, vector, matrix}, [](const Tensors& x, const Tensors& p) {
           return Tensors{x[0].matmul(p[2])};
         });
       }},
      {"an empty stage",
       [] { return with_parameters({}, [](const Tensors& x, const Tensors&) { return Tensors{x[0]}; }); }},
      {"no parameters",
       [] {
         return with_parameters({}, [](const Tensors& x, const Tensors&) { return Tensors{x[0].sin()}; });
       }},
      {"an input that leads nowhere",
       [=] {
         return with_parameters({matrix},
                                [](const Tensors& x, const Tensors& p) { return Tensors{x[1].matmul(p[0])}; },
                                {{2}, {kSize, kSize}});
       }},
      {"outputs that only parameters lead to",
       [=] {
         return with_parameters({matrix},
                                [](const Tensors&, const Tensors& p) { return Tensors{p[0].sin()}; });
       }},
      {"queries that are parameters",
       [=] {
         return with_parameters({{kBatch, kHeads, 5, 8}, {kBatch, kHeads, 5, 8}},
                                [](const Tensors& x, const Tensors& p) {
                                  return Tensors{at::scaled_dot_product_attention(p[0], x[0], x[0] * p[1])};
                                },
                                {{kBatch, kHeads, 5, 8}});
       }},
      {"writing into a part of a tensor in place",
       [=] {
         return with_parameters({matrix, vector}, [](const Tensors& x, const Tensors& p) {
           Tensor h = x[0].matmul(p[0]);
           h.select(1, 0).mul_(p[1]);
           h.select(1, 1).copy_(p[1].expand({kBatch, kSize}));
           return Tensors{h.sin()};
         });
       }},
      {"writing into a part of a parameter's copy in place",
       [=] {
         return with_parameters({{kBatch, kLength, kSize}, matrix}, [](const Tensors& x, const Tensors& p) {
           const Tensor h = p[0].clone();
           h.select(1, 0).copy_(x[0].select(1, 0).matmul(p[1]));
           return Tensors{h.matmul(p[1])};
         });
       }},
      {"convolution, batched products and a vector",
       [=] {
         torch::nn::Conv1d conv(torch::nn::Conv1dOptions(kLength, kLength, 3).padding(1));
         auto module = std::make_shared<ParametersImpl>(
             std::vector<std::vector<int64_t>>{{kBatch, kSize, kSize}, {kSize}});
         module->register_module("conv", conv);
         return Stage{module, [conv, p = module->p](const Tensors& x) mutable {
                        const Tensor h = at::gelu(conv(x[0])).bmm(p[0]);
                        return Tensors{h.matmul(p[1]), h[0].mv(p[1])};
                      }};
       }},
  };
  return table;
}

}  // namespace

TEST_CASE("both halves of backward give what the whole gives, to the bit and with the same work", "[split]") {
  for (const auto& [name, make] : all_stages()) {
    torch::manual_seed(3);
    const Stage stage = make();
    CAPTURE(name);
    for (const int micro_batches : {1, 3}) {
      CAPTURE(micro_batches);
      const Outcome wanted = train(stage, Way::whole, micro_batches);
      require_same_outcome(wanted, train(stage, Way::halves, micro_batches));
      require_same_outcome(wanted, train(stage, Way::all_first_halves_first, micro_batches));
    }
  }
}

}  // namespace pacer::testing::stages
