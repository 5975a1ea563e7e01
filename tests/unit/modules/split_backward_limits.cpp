// The backward pass in two halves: what is kept in between, when hooks run, what exceptions leave, and what
// is refused.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/autograd.h>

#include <pacer/modules/detail/autograd_node.h>
#include <pacer/modules/split_backward.h>

#include "support/catch.h"
#include "support/cpu_memory.h"
#include "support/modules/autocast.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/stages.h"

namespace pacer::testing::stages {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("between the halves only products' operands and the gradients of their results are kept",
          "[split]") {
  for (const bool autocast : {false, true}) {
    CAPTURE(autocast);
    const CountedCpuMemory memory;
    const Stage stage = three_blocks(0, autocast);
    const int64_t batch = 8, length = 64, rows = batch * length;
    const Tensor x = torch::randn({batch, length, kSize}).requires_grad_();
    Tensor dy = torch::randn({batch, length, kSize});
    const int64_t at_rest = memory.live();
    Tensor y;
    {
      const auto cast = autocast ? std::make_unique<Autocast>(at::kCPU) : nullptr;
      y = stage.forward({x})[0];
    }
    SplitBackward backward({y}, {x});
    const auto last_node = y.grad_fn();  // that it is still known keeps nothing
    y.reset();
    const int64_t before = memory.live() - at_rest;
    memory.reset_peak();
    backward.input_half({dy});
    const int64_t between = memory.live() - at_rest, peak = memory.peak() - at_rest;

    // In each block the operands of four products are 7 rows wide, and the gradients of their results 9; but
    // that of the last one is dy itself where it need not be cast. And there are the gradients of two norms.
    const int64_t row = rows * kSize * (autocast ? 2 : 4);
    const int64_t formula = 3 * (16 * row + 4 * 4 * kSize) - (autocast ? 0 : row);
    CAPTURE(row, formula);
    REQUIRE(between <= formula + formula / 100);
    REQUIRE(between >= formula);
    // What only the first half needs goes while it runs: a block's own gradients come on top, not all that is
    // kept.
    REQUIRE(peak < before + 10 * row);

    memory.reset_peak();
    backward.weight_half();
    int64_t gradients = 0;
    for (const Tensor& parameter : stage.module->parameters()) gradients += parameter.grad().nbytes();
    const int64_t after = memory.live() - at_rest;
    REQUIRE(after >= gradients);
    REQUIRE(after <= gradients + 64 * 64);
    // What it used goes while it runs, too: it never holds what was kept and all gradients. (A CPU's products
    // in 16 bits have memory of their own.)
    if (!autocast) REQUIRE(memory.peak() - at_rest < between + gradients / 2);
  }
}

TEST_CASE("hooks inside the graph run in the first half, hooks on parameters in the second, all of them once",
          "[split]") {
  torch::manual_seed(3);
  Block block;
  std::string order;
  const auto note = [&order](char letter) {
    return [&order, letter](const Tensor& gradient) {
      order += letter;
      return gradient * 2;
    };
  };
  block->up->weight.register_hook(note('w'));
  block->norm1->weight.register_hook(note('n'));
  const auto run = [&](bool in_halves) {
    order.clear();
    block->zero_grad();
    torch::manual_seed(5);
    const Tensor x = torch::randn({kLength, kSize}).requires_grad_();
    x.register_hook(note('x'));
    const Tensor scaled = x * 1.5, h = block->up(scaled);  // h: of a product
    scaled.register_hook(note('s'));
    h.register_hook(note('h'));
    h.retain_grad();
    const Tensor y = block(block->down(h).unsqueeze(0));
    y.register_hook(note('y'));
    const Tensor dy = torch::randn_like(y.detach());
    std::vector<Tensor> gradients;
    if (in_halves) {
      SplitBackward backward({y}, {x});
      gradients = backward.input_half({dy});
      REQUIRE(order == "yhsx");
      backward.weight_half();
    } else {
      y.backward(dy);
      gradients = {x.grad()};
    }
    gradients.push_back(h.grad());
    for (const Tensor& parameter : block->parameters()) gradients.push_back(parameter.grad().clone());
    return gradients;
  };
  const auto wanted = run(false);
  require_same(wanted, run(true));
  REQUIRE(std::count(order.begin(), order.end(), 'w') == 1);
  REQUIRE(std::count(order.begin(), order.end(), 'n') == 1);
  REQUIRE(order.size() == 6);
}

TEST_CASE("an output without a gradient takes no part", "[split]") {
  torch::manual_seed(3);
  Block block;
  const Tensor x = torch::randn({kBatch, kLength, kSize}).requires_grad_();
  const auto outputs = [&] { return Tensors{block(x), block->up(x), block->down->bias * 2}; };
  const auto parameters = block->parameters();
  torch::autograd::backward({outputs()[1]}, {torch::ones({kBatch, kLength, 4 * kSize})});
  std::vector<Tensor> wanted = {x.grad()};
  for (const Tensor& parameter : parameters) wanted.push_back(parameter.grad());
  block->zero_grad();
  SplitBackward backward(outputs(), {x, Tensor()});
  Tensors found = backward.input_half({Tensor(), torch::ones({kBatch, kLength, 4 * kSize}), Tensor()});
  REQUIRE_FALSE(found[1].defined());
  backward.weight_half();
  found.pop_back();
  for (const Tensor& parameter : parameters) found.push_back(parameter.grad());
  require_same(wanted, found);

  SplitBackward of_nothing(outputs(), {x});
  REQUIRE_FALSE(of_nothing.input_half({Tensor(), Tensor(), Tensor()})[0].defined());
  of_nothing.weight_half();  // adds nothing
  require_same({wanted.begin() + 1, wanted.end()}, {found.begin() + 1, found.end()});
}

TEST_CASE("halves that nobody asks for give their memory back", "[split]") {
  Block block;
  const CountedCpuMemory memory;
  const Tensor x = torch::randn({kBatch, kLength, kSize}).requires_grad_(),
               dy = torch::randn({kBatch, kLength, kSize});
  const int64_t at_rest = memory.live();
  {
    SplitBackward whole({block(x)}, {x}), half({block(x), block(x)}, {x});
    half.input_half({Tensor(), dy});
    REQUIRE(memory.live() > at_rest);
  }
  REQUIRE(memory.live() <= at_rest);
}

namespace {

// The identity, whose backward throws.
struct Broken : torch::autograd::Function<Broken> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static Tensors backward(torch::autograd::AutogradContext*, const Tensors&) {
    throw std::runtime_error("broken");
  }
};

// All nodes that the tensor's graph has.
std::vector<detail::NodePtr> nodes_of(const Tensor& y) {
  std::vector<detail::NodePtr> nodes = {y.grad_fn()};
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (const auto& edge : nodes[i]->next_edges()) {
      if (edge.function && std::find(nodes.begin(), nodes.end(), edge.function) == nodes.end())
        nodes.push_back(edge.function);
    }
  }
  return nodes;
}

}  // namespace

TEST_CASE("an exception in a half leaves neither hooks nor memory, and ends both", "[split]") {
  torch::manual_seed(3);
  Block block;
  const CountedCpuMemory memory;
  const Tensor x = torch::randn({kBatch, kLength, kSize}).requires_grad_(),
               dy = torch::randn({kBatch, kLength, kSize});
  const int64_t at_rest = memory.live();
  const auto on_path = [&] { return block(Broken::apply(block(x))); };
  const auto off_path = [&] { return block(block(x).matmul(Broken::apply(block->out->weight))); };
  {
    Tensor y = on_path();
    const auto nodes = nodes_of(y);
    REQUIRE(nodes.size() > 30);
    SplitBackward backward({y}, {x});
    y.reset();
    const int64_t with_graph = memory.live() - at_rest;
    REQUIRE_THROWS_WITH(backward.input_half({dy}), ContainsSubstring("broken"));
    // Of nodes that somebody holds, those of products keep their operands.
    REQUIRE(memory.live() - at_rest < with_graph * 2 / 3);
    for (const auto& node : nodes) {
      CAPTURE(node->name());
      REQUIRE(node->pre_hooks().empty());
      REQUIRE(node->post_hooks().empty());
    }
    REQUIRE_THROWS_WITH(backward.input_half({dy}), ContainsSubstring("run the stage's forward pass again"));
    REQUIRE_THROWS_WITH(backward.weight_half(), ContainsSubstring("after a half that threw"));
  }
  REQUIRE(memory.live() <= at_rest);
  for (const Tensor& parameter : block->parameters()) REQUIRE_FALSE(parameter.grad().defined());
  {
    Tensor y = off_path();
    const auto nodes = nodes_of(y);
    SplitBackward backward({y}, {x});
    y.reset();
    backward.input_half({dy});
    for (const auto& node : nodes) REQUIRE((node->pre_hooks().empty() && node->post_hooks().empty()));
    REQUIRE_THROWS_WITH(backward.weight_half(), ContainsSubstring("broken"));
    REQUIRE_THROWS_WITH(backward.weight_half(), ContainsSubstring("after a half that threw"));
  }
}

TEST_CASE("halves in the wrong order and gradients that do not fit are errors that say what to do",
          "[split]") {
  torch::manual_seed(3);
  Block block;
  const Tensor x = torch::randn({kBatch, kLength, kSize}).requires_grad_(),
               dy = torch::randn({kBatch, kLength, kSize});
  SplitBackward backward({block(x)}, {x});
  REQUIRE_THROWS_WITH(backward.weight_half(), ContainsSubstring("before input_half"));
  REQUIRE_THROWS_WITH(backward.input_half({}), ContainsSubstring("0 gradients for 1 outputs"));
  REQUIRE_THROWS_WITH(backward.input_half({dy[0]}),
                      ContainsSubstring("output 0 has shape [2, 8, 32], but its gradient has shape [8, 32]"));
  backward.input_half({dy});  // nothing had been changed
  REQUIRE_THROWS_WITH(backward.input_half({dy}), ContainsSubstring("ran before"));
  backward.weight_half();
  REQUIRE_THROWS_WITH(backward.weight_half(), ContainsSubstring("twice"));
  REQUIRE_THROWS_WITH(SplitBackward({x}, {Tensor(), x * 2}),
                      ContainsSubstring("input 1, of shape [2, 8, 32], was computed from other tensors"));
}

}  // namespace pacer::testing::stages
