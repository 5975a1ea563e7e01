// The backward pass in two halves against the whole one, over random graphs: inputs, parameters and what was
// computed from both meet in random operations.
#include <random>
#include <vector>

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/layer_norm.h>
#include <torch/autograd.h>

#include <pacer/modules/split_backward.h>

#include "support/catch.h"
#include "support/modules/call_counts.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

constexpr int64_t kSize = 6;

// A custom function that computes all of its gradients at once, whatever is asked of it.
struct Product : torch::autograd::Function<Product> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& a, const Tensor& b) {
    context->save_for_backward({a, b});
    return a.mm(b);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

// Matrices of one size, among them inputs and parameters, and what random operations make of them.
struct RandomGraph {
  explicit RandomGraph(uint64_t seed) {
    torch::manual_seed(seed);
    std::mt19937_64 random(seed);
    const auto leaf = [] { return torch::randn({kSize, kSize}).requires_grad_(); };
    for (uint64_t i = random() % 3; i > 0; --i) inputs.push_back(leaf());
    for (uint64_t i = random() % 5; i > 0; --i) parameters.push_back(leaf());
    const Tensor vector = torch::randn({kSize}).requires_grad_();
    std::vector<Tensor> known = {torch::randn({kSize, kSize})};
    known.insert(known.end(), inputs.begin(), inputs.end());
    known.insert(known.end(), parameters.begin(), parameters.end());
    parameters.push_back(vector);
    const auto any = [&] { return known[random() % known.size()]; };
    for (uint64_t i = 1 + random() % 25; i > 0; --i) {
      const Tensor a = any(), b = any(), c = any();
      const auto make = [&]() -> Tensor {
        switch (random() % 10) {
          case 0:
            return a.mm(b).tanh();
          case 1:
            return at::addmm(vector, a, b).tanh();
          case 2:
            return Product::apply(a, b).tanh();
          case 3:
            return at::baddbmm(c.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0)).squeeze(0).tanh();
          case 4:
            return at::layer_norm(a, {kSize}, vector, vector);
          case 5:
            return a.mv(vector).tanh() * b;
          case 6:
            return a + b;
          case 7:
            return a * b.tanh();
          case 8:
            return a.t();
          default: {
            const Tensor copy = a.clone();
            copy[0].mul_(b[1]);
            return copy;
          }
        }
      };
      known.push_back(make());
    }
    for (uint64_t i = 1 + random() % 3; i > 0; --i) {
      outputs.push_back(i == 1 ? known.back() : any());
      gradients.push_back(random() % 8 == 0 ? Tensor() : torch::randn({kSize, kSize}));
    }
  }

  Tensors inputs, parameters, outputs, gradients;
};

}  // namespace

TEST_CASE("over random graphs both halves of backward give what the whole gives", "[split]") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    const RandomGraph whole(seed);
    Tensors roots, seeds;
    for (size_t i = 0; i < whole.outputs.size(); ++i) {
      if (!whole.outputs[i].requires_grad() || !whole.gradients[i].defined()) continue;
      roots.push_back(whole.outputs[i]);
      seeds.push_back(whole.gradients[i]);
    }
    int64_t products;
    {
      const CallCounts calls;
      if (!roots.empty()) torch::autograd::backward(roots, seeds);
      products = calls.products();
    }

    const RandomGraph halves(seed);
    SplitBackward backward(halves.outputs, halves.inputs);
    const CallCounts calls;
    const Tensors dx = backward.input_half(halves.gradients);
    for (const Tensor& parameter : halves.parameters) REQUIRE_FALSE(parameter.grad().defined());
    backward.weight_half();
    REQUIRE(calls.products() == products);

    const auto require_same = [](const Tensor& wanted, const Tensor& found) {
      REQUIRE(wanted.defined() == found.defined());
      if (wanted.defined()) REQUIRE(wanted.equal(found));
    };
    for (size_t i = 0; i < dx.size(); ++i) require_same(whole.inputs[i].grad(), dx[i]);
    for (size_t i = 0; i < whole.parameters.size(); ++i) {
      require_same(whole.parameters[i].grad(), halves.parameters[i].grad());
    }
  }
}

}  // namespace pacer::testing
