// The gates of progressive layer dropping: what a kept, a dropped and an evaluated block give, that the
// expected output is the block's own, and that a draw is the same whenever and wherever it is asked for.
// What a Session does with dropped layers is in layer_drop_gradients.cpp, gates by sample are in
// layer_drop_samples.cpp.
#include <cmath>
#include <functional>
#include <thread>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/schedulers/layer_drop_sequential.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/schedulers/gate_progress.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

LayerDrop gates_without_blocks(int64_t layers, const LayerDropOptions& options) {
  LayerDrop gates(options);
  for (int64_t i = 0; i < layers; ++i) REQUIRE(gates->add() == i);
  return gates;
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  for (const auto& item : module.named_buffers()) names.push_back("buffer " + item.key());
  return names;
}

// y = f(x) that keeps only x for backward, and runs f again there: activation checkpointing.
struct RunAgain : torch::autograd::Function<RunAgain> {
  using Block = std::function<Tensor(const Tensor&)>;
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, int64_t block) {
    context->save_for_backward({x});
    context->saved_data["block"] = block;
    return (*reinterpret_cast<const Block*>(block))(x).clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::AutoGradMode with_grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto* block = reinterpret_cast<const Block*>(context->saved_data["block"].toInt());
    (*block)(x).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

// Blocks behind gates, each recomputed in backward or not.
struct RecomputedStackImpl : torch::nn::Module {
  RecomputedStackImpl(bool recompute, const LayerDropOptions& options)
      : layer_drop(register_module("layer_drop", LayerDrop(options))) {
    torch::manual_seed(4);
    for (int64_t i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
      layer_drop->add(*blocks.back());
    }
    for (int64_t i = 0; i < 4; ++i) {
      gated.emplace_back([this, i](const Tensor& x) {
        kept.push_back(false);
        return layer_drop->gate(i, x, [this, i](const Tensor& h) {
          kept.back() = true;
          return h + torch::tanh(blocks[static_cast<size_t>(i)](h));
        });
      });
    }
    recomputes = recompute;
  }
  Tensor forward(Tensor x) {
    kept.clear();
    for (const auto& block : gated) {
      x = recomputes ? RunAgain::apply(x, reinterpret_cast<int64_t>(&block)) : block(x);
    }
    return x;
  }

  LayerDrop layer_drop;
  bool recomputes;
  std::vector<torch::nn::Linear> blocks;
  std::vector<RunAgain::Block> gated;
  std::vector<bool> kept;  // by run of a gate
};
TORCH_MODULE(RecomputedStack);

}  // namespace

TEST_CASE("a kept block's change is divided by its probability, a dropped block is the identity",
          "[session][layer_drop]") {
  constexpr int64_t kLayers = 4;
  auto gates = gates_without_blocks(kLayers, LayerDropOptions().theta_bar(0.4).gamma(0.2).seed(11));
  torch::manual_seed(1);
  int kept = 0, dropped = 0;
  for (int64_t step = 0; step < 40; ++step) {
    gates->set_progress(gate_progress(step));
    const double theta = 0.6 * std::exp(-0.2 * static_cast<double>(step)) + 0.4;
    for (int64_t i = 0; i < kLayers; ++i) {
      CAPTURE(step, i);
      const Tensor x = torch::randn({2, 3}).requires_grad_(), weight = torch::randn({3, 3}).requires_grad_();
      Tensor y;
      const Tensor output = gates->gate(i, x, [&](const Tensor& h) { return y = h + h.mm(weight); });
      output.sum().backward();
      const double p = 1 - static_cast<double>(i + 1) / kLayers * (1 - theta);
      if (!y.defined()) {
        ++dropped;
        REQUIRE(output.is_same(x));
        REQUIRE_FALSE(weight.grad().defined());
        REQUIRE(x.grad().equal(torch::ones_like(x)));
      } else if (step == 0) {
        REQUIRE(output.is_same(y));
      } else {
        ++kept;
        const Tensor wide = x.detach().to(at::kDouble);
        const Tensor expected = wide + (y.detach().to(at::kDouble) - wide) / p;
        REQUIRE(distance(output, expected) < 1e-5);  // fp32 sums of a few numbers below 20
        const Tensor gradient = wide.t().mm(torch::ones({2, 3}, at::kDouble)) / p;
        REQUIRE(distance(weight.grad(), gradient) < 1e-5);
      }
    }
  }
  CHECK(kept > 40);
  CHECK(dropped > 40);
}

TEST_CASE("in evaluation every block runs, and nothing is scaled", "[session][layer_drop]") {
  auto gates = gates_without_blocks(3, LayerDropOptions().theta_bar(0.01).gamma(100));
  gates->eval();
  const Tensor x = torch::ones({2});
  for (int64_t step = 0; step < 20; ++step) {
    gates->set_progress(gate_progress(step));
    for (int64_t i = 0; i < 3; ++i) {
      const Tensor y = torch::full({2}, 7.0);
      REQUIRE(gates->gate(i, x, [&](const Tensor&) { return y; }).is_same(y));
      REQUIRE(gates->keeps(i));
    }
  }
}

TEST_CASE("the expected output of a gate is the block's output", "[session][layer_drop]") {
  constexpr int64_t kLayers = 3, kSeeds = 4, kSteps = 3000;
  const Tensor x = torch::tensor({0.5, -2.0}, at::kDouble), y = torch::tensor({3.0, 1.0}, at::kDouble);
  std::vector<Tensor> sums(kLayers);
  for (Tensor& sum : sums) sum = torch::zeros({2}, at::kDouble);
  for (int64_t seed = 0; seed < kSeeds; ++seed) {
    auto gates = gates_without_blocks(
        kLayers, LayerDropOptions().theta_bar(0.4).gamma(1).seed(static_cast<uint64_t>(seed)));
    for (int64_t step = 0; step < kSteps; ++step) {
      gates->set_progress(gate_progress(1000 + step, step % 3));  // theta has long arrived at 0.4
      for (int64_t i = 0; i < kLayers; ++i) {
        sums[i] += gates->gate(i, x, [&](const Tensor&) { return y; });
      }
    }
  }
  constexpr double kDraws = kSeeds * kSteps;
  for (int64_t i = 0; i < kLayers; ++i) {
    // x + (y - x) k / p with k of a coin of probability p: standard deviation |y - x| sqrt((1 - p) / p).
    const double p = 1 - static_cast<double>(i + 1) / kLayers * 0.6;
    const Tensor bound = 4 * (y - x).abs() * std::sqrt((1 - p) / p / kDraws);
    CAPTURE(i, sums[i] / kDraws);
    CHECK(((sums[i] / kDraws - y).abs() < bound).all().item<bool>());
  }
}

TEST_CASE("a gate draws what the pure rule says, in any order of asking", "[session][layer_drop]") {
  constexpr int64_t kLayers = 5;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{9}, ~uint64_t{0}}) {
    const LayerDropOptions options = LayerDropOptions().theta_bar(0.3).gamma(0.05).seed(seed);
    auto gates = gates_without_blocks(kLayers, options);
    for (const int64_t step : {50, 3, 3, 0, 1'000'000, 17}) {
      for (int64_t m = 0; m < 4; ++m) {
        gates->set_progress(gate_progress(step, m));
        for (int64_t i = kLayers - 1; i >= 0; --i) {
          REQUIRE(gates->keeps(i) == keeps_layer(options, i, kLayers, gate_progress(step, m)));
        }
      }
    }
  }
}

TEST_CASE("a block that is recomputed in backward sees its own draw again, in any thread",
          "[session][layer_drop]") {
  const LayerDropOptions options = LayerDropOptions().theta_bar(0.3).gamma(1).seed(5);
  RecomputedStack plain(false, options), recomputed(true, options);
  FusedAdamW optimizer(plain->parameters()), peer(recomputed->parameters());
  Session calm(*plain, optimizer), session(*recomputed, peer);
  calm.use(plain->layer_drop).use(GradientAccumulation(2));
  session.use(recomputed->layer_drop).use(GradientAccumulation(2));
  int dropped = 0;
  for (int i = 0; i < 16; ++i) {
    torch::manual_seed(i);
    const Tensor batch = torch::randn({3, kWidth});
    auto [x] = calm.begin(batch);
    calm.backward(plain(x).square().mean());
    calm.step();
    auto [z] = session.begin(batch);
    const Tensor loss = recomputed(z.clone().requires_grad_()).square().mean();
    const std::vector<bool> in_forward = recomputed->kept;
    REQUIRE(in_forward == plain->kept);
    std::thread([&] { session.backward(loss); }).join();
    // Backward meets the blocks from the last to the first.
    std::vector<bool> again(recomputed->kept.rbegin(), recomputed->kept.rbegin() + 4);
    REQUIRE(recomputed->kept.size() == 8);
    REQUIRE(again == in_forward);
    session.step();
    for (const bool kept : in_forward) dropped += !kept;
    REQUIRE(same_bits(plain->parameters(), recomputed->parameters()));
  }
  CHECK(dropped > 10);
  CHECK(dropped < 54);
}

TEST_CASE("LayerDropSequential is called like Sequential and is the loop over gates",
          "[session][layer_drop]") {
  torch::nn::Sequential plain;
  LayerDropSequential stack{LayerDrop(early_drops())};
  LayerDrop loop_gates(early_drops());
  std::vector<torch::nn::Linear> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.emplace_back(kWidth, kWidth);
    plain->push_back(blocks.back());
    stack->push_back(blocks.back());
    loop_gates->add(*blocks.back());
  }
  CHECK(names_of(*stack) == names_of(*plain));
  CHECK(names_of(*stack).at(0) == "0.weight");
  CHECK(stack->size() == 4);
  auto gates = std::dynamic_pointer_cast<LayerDropImpl>(stack->named_modules()["layer_drop"]);
  REQUIRE(gates != nullptr);
  torch::manual_seed(1);
  bool some_differ = false;
  for (int64_t step = 0; step < 20; ++step) {
    gates->set_progress(gate_progress(step));
    loop_gates->set_progress(gate_progress(step));
    const Tensor x = torch::randn({2, kWidth});
    Tensor by_hand = x;
    for (int64_t i = 0; i < 4; ++i) by_hand = loop_gates->gate(i, by_hand, blocks[static_cast<size_t>(i)]);
    REQUIRE(same_bits(stack->forward(x), by_hand));
    some_differ = some_differ || !same_bits(by_hand, plain->forward(x));
  }
  CHECK(some_differ);
  stack->eval();
  const Tensor x = torch::randn({2, kWidth});
  CHECK(same_bits(stack->forward(x), plain->forward(x)));
  CHECK(contains(refusal([] { LayerDropSequential{LayerDrop(nullptr)}; }), "empty"));
}

TEST_CASE("gates change no name of a parameter or buffer", "[session][layer_drop]") {
  auto without = small_model(), with = small_model_with_gates(early_drops());
  CHECK(names_of(*without) == names_of(*with));
}

TEST_CASE("a gate refuses layers that are not there and blocks that change the shape",
          "[session][layer_drop]") {
  auto gates = gates_without_blocks(2, LayerDropOptions().theta_bar(0.99).gamma(100));
  const auto same = [](const Tensor& h) { return h; };
  for (const int64_t i : {-1, 2}) {
    CHECK(contains(refusal([&] { gates->gate(i, torch::ones({2}), same); }), "2 layers and no layer"));
    CHECK(contains(refusal([&] { gates->keeps(i); }), "no layer " + std::to_string(i)));
  }
  gates->set_progress(gate_progress(5));
  REQUIRE(gates->keeps(1));
  // A shape that would broadcast, too.
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3}, {1}, {2, 2}}) {
    const std::string message =
        refusal([&] { gates->gate(1, torch::ones({2}), [&](const Tensor&) { return torch::ones(shape); }); });
    CHECK(contains(message, "keep the shape"));
  }
}

TEST_CASE("a block that changes the shape is refused from the first step on", "[session][layer_drop]") {
  LayerDrop gates(LayerDropOptions().theta_bar(0.5).gamma(1));
  gates->add();
  const auto narrowing = [](const Tensor& x) { return x.narrow(0, 0, 1); };
  for (const int64_t step : {0, 3}) {
    Progress progress;
    progress.step = step;
    gates->set_progress(progress);
    if (!gates->keeps(0)) continue;
    CHECK(contains(refusal([&] { gates->gate(0, torch::ones({2}), narrowing); }), "keep the shape"));
  }
}

TEST_CASE("a LayerDrop cannot be cloned, as its copy would hold the other model's parameters",
          "[session][layer_drop]") {
  LayerDrop gates;
  CHECK_THROWS(gates->clone());
}

}  // namespace pacer::testing
