// A recomputed region against the same function run plainly: gradients and results to the bit, what it sees
// again, what it puts back, what it refuses, and the memory that it saves.
#include <functional>
#include <string>
#include <tuple>

#include <ATen/autocast_mode.h>
#include <torch/autograd.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/device/detail/random_state.h>
#include <pacer/modules/recompute.h>

#include "support/catch.h"
#include "support/cpu_memory.h"
#include "support/message_of.h"
#include "support/modules/autocast.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr int64_t kSize = 32;

// A pre-norm MLP block with dropout; `hidden` times as wide inside.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(double dropout = 0.1, int64_t size = kSize, int64_t hidden = 4)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))),
        up(register_module("up", torch::nn::Linear(size, hidden * size))),
        down(register_module("down", torch::nn::Linear(hidden * size, size))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}
  Tensor forward(const Tensor& x) { return x + drop(down(at::gelu(up(norm(x))))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Mlp);

struct Outcome {
  Tensor y, dx, random;
  std::vector<Tensor> gradients;
};

// One pass: forward, backward with fixed weights of the results, and what it leaves.
Outcome run(torch::nn::Module& module, const std::function<Tensor(const Tensor&)>& f, bool autocast = false) {
  module.zero_grad();
  torch::manual_seed(5);
  const Tensor x = torch::randn({3, kSize}).requires_grad_(), weight = torch::randn({3, kSize});
  Outcome outcome;
  {
    const auto cast = autocast ? std::make_unique<Autocast>(at::kCPU) : nullptr;
    outcome.y = f(x);
  }
  (outcome.y.to(at::kFloat) * weight).sum().backward();
  outcome.dx = x.grad();
  for (const Tensor& parameter : module.parameters()) outcome.gradients.push_back(parameter.grad());
  outcome.random = detail::get_random_state(at::kCPU).cpu;
  return outcome;
}

void require_same(const Outcome& a, const Outcome& b) {
  REQUIRE(a.y.equal(b.y));
  REQUIRE(a.dx.equal(b.dx));
  REQUIRE(a.random.equal(b.random));
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    CAPTURE(i);
    REQUIRE(a.gradients[i].defined() == b.gradients[i].defined());
    if (a.gradients[i].defined()) REQUIRE(a.gradients[i].equal(b.gradients[i]));
  }
}

}  // namespace

TEST_CASE("a recomputed region gives what plain training gives, to the bit", "[recompute]") {
  torch::manual_seed(1);
  Mlp a, b;
  torch::nn::Sequential both(a, b);
  const auto plain = [&](const Tensor& x) { return b(a(x)); };
  const auto in_row = [&](const Tensor& x) {
    return recompute(*b, &MlpImpl::forward, recompute(*a, &MlpImpl::forward, x));
  };
  const auto nested = [&](const Tensor& x) { return recompute(*both, in_row, x); };
  for (const bool autocast : {false, true}) {
    CAPTURE(autocast);
    const Outcome wanted = run(*both, plain, autocast);
    require_same(wanted, run(*both, in_row, autocast));
    require_same(wanted, run(*both, nested, autocast));
  }
  SECTION("in eval(), with frozen parameters, with an argument that needs no gradient") {
    b->eval();
    a->up->weight.set_requires_grad(false);
    require_same(run(*both, plain), run(*both, nested));
    const Tensor x = torch::randn({2, kSize});
    const auto gradient = [&](const std::function<Tensor(const Tensor&)>& f) {
      both->zero_grad();
      torch::manual_seed(3);
      f(x).sum().backward();
      return a->down->weight.grad().clone();
    };
    REQUIRE(gradient(plain).equal(gradient(nested)));
  }
  SECTION("with hooks on gradients, which run once") {
    a->up->weight.register_hook([](const Tensor& gradient) { return gradient * 2; });
    require_same(run(*both, plain), run(*both, nested));
  }
  SECTION("without gradients it runs once and makes no graph") {
    const torch::NoGradGuard no_grad;
    REQUIRE_FALSE(in_row(torch::randn({2, kSize})).requires_grad());
  }
  SECTION("by torch::autograd::grad, and twice through a graph that is kept") {
    const Tensor x = torch::randn({2, kSize}).requires_grad_();
    const auto gradients = [&](const std::function<Tensor(const Tensor&)>& f) {
      torch::manual_seed(3);
      const Tensor loss = f(x).square().sum();
      auto first = torch::autograd::grad({loss}, {x, a->up->weight}, {}, /*retain_graph=*/true);
      const auto second = torch::autograd::grad({loss}, {x, b->up->weight});
      first.insert(first.end(), second.begin(), second.end());
      return first;
    };
    const auto wanted = gradients(plain), found = gradients(nested);
    for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(wanted[i].equal(found[i]));
  }
}

TEST_CASE("a recomputed region takes any arguments and gives tuples, pairs and vectors", "[recompute]") {
  torch::manual_seed(1);
  Mlp module;
  using Rest = std::pair<std::vector<Tensor>, std::optional<Tensor>>;
  const auto f = [&](const Tensor& x, int64_t scale, const Rest& rest, const std::string& name) {
    Tensor y = module(x) * static_cast<double>(scale) + rest.first[0] * rest.first[1];
    if (rest.second) y = y + *rest.second;
    return std::make_tuple(y, at::argmax(y, -1), name == "used" ? y.sin() : Tensor());
  };
  const auto pass = [&](bool again, const std::string& name) {
    torch::manual_seed(2);
    module->zero_grad();
    const auto leaf = [] { return torch::randn({2, kSize}).requires_grad_(); };
    const Tensor x = leaf();
    const Rest rest{{leaf(), leaf()}, leaf()};
    const auto [y, index, z] = again ? recompute(*module, f, x, int64_t{3}, rest, name) : f(x, 3, rest, name);
    REQUIRE(index.scalar_type() == at::kLong);
    REQUIRE_FALSE(index.requires_grad());
    (z.defined() ? z : y).square().sum().backward();
    return std::vector<Tensor>{x.grad(), rest.first[0].grad(), rest.first[1].grad(), rest.second->grad(),
                               module->up->weight.grad()};
  };
  for (const std::string name : {"used", "undefined"}) {
    CAPTURE(name);
    const auto wanted = pass(false, name), found = pass(true, name);
    for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(wanted[i].equal(found[i]));
  }
  SECTION("an undefined tensor is an argument, too, and one that is given twice gets both gradients") {
    const Tensor x = torch::randn({2, kSize}).requires_grad_();
    const auto g = [&](const Tensor& a, const Tensor& mask, const Tensor& b) {
      return mask.defined() ? a : module(a) * b;
    };
    const auto gradient = [&](const Tensor& y) {
      torch::manual_seed(2);
      return torch::autograd::grad({y.sum()}, {x})[0];
    };
    module->eval();
    REQUIRE(gradient(recompute(*module, g, x, Tensor(), x)).allclose(gradient(g(x, Tensor(), x))));
  }
  SECTION("a result that nothing uses gives no gradients to what only it depends on") {
    torch::nn::Linear first(kSize, kSize), second(kSize, kSize);
    torch::nn::Sequential both(first, second);
    const auto [y, z] = recompute(
        *both, [&](const Tensor& h) { return std::make_pair(first(h), second(h)); },
        torch::randn({2, kSize}));
    y.sum().backward();
    REQUIRE(first->weight.grad().defined());
    REQUIRE_FALSE(second->weight.grad().defined());
  }
}

TEST_CASE("a module in two regions gets each gradient once", "[recompute]") {
  torch::manual_seed(1);
  Mlp a, b;
  torch::nn::Sequential both(a, b);
  const auto plain = [&](const Tensor& x) { return a(b(a(x))); };
  const auto twice = [&](const Tensor& x) {
    const auto f = &MlpImpl::forward;
    return recompute(*a, f, recompute(*b, f, recompute(*a, f, x)));
  };
  int landings = 0;
  detail::add_gradient_hook(a->up->weight, both.ptr(), [&](const Tensor&) { ++landings; });
  const Outcome found = run(*both, twice);
  REQUIRE(landings == 1);
  const Outcome wanted = run(*both, plain);
  REQUIRE(found.dx.equal(wanted.dx));
  // The order in which autograd adds up the two uses is its own.
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    REQUIRE(found.gradients[i].allclose(wanted.gradients[i], 1e-5, 1e-6));
  }
  SECTION("and one that is registered twice in its parent, too") {
    struct Shared : torch::nn::Module {
      explicit Shared(Mlp& mlp) {
        register_module("one", mlp);
        register_module("two", mlp);
      }
    };
    const Shared shared(a);
    require_same(run(*a, [&](const Tensor& x) { return a(x); }), run(*a, [&](const Tensor& x) {
                   return recompute(
                       const_cast<Shared&>(shared), [&](const Tensor& h) { return a(h); }, x);
                 }));
  }
}

TEST_CASE("autocast's memory of casts takes no gradient from a weight that is also used outside",
          "[recompute]") {
  torch::manual_seed(1);
  torch::nn::Linear tied(kSize, kSize);
  const auto gradient = [&](bool again) {
    tied->zero_grad();
    torch::manual_seed(2);
    const Tensor x = torch::randn({2, kSize}).requires_grad_();
    Tensor y;
    {
      const Autocast autocast(at::kCPU);
      y = tied(again ? recompute(*tied, &torch::nn::LinearImpl::forward, x) : tied(x)).to(at::kFloat);
    }
    y.sum().backward();
    return tied->weight.grad().clone();
  };
  const Tensor wanted = gradient(false), found = gradient(true);
  REQUIRE((found - wanted).norm().item<double>() < 2e-2 * wanted.norm().item<double>());  // of bf16
}

TEST_CASE("buffers are for the second run what they were for the first, and move once", "[recompute]") {
  // Its output depends on a buffer that each pass changes.
  struct CounterImpl : torch::nn::Module {
    CounterImpl()
        : norm(register_module("norm", torch::nn::BatchNorm1d(kSize))),
          passes(register_buffer("passes", torch::ones({1}))),
          table(register_buffer("table", torch::randn({kSize}))) {}
    Tensor forward(const Tensor& x) {
      passes.add_(1);
      return norm(x) * passes.clone() + table;
    }
    torch::nn::BatchNorm1d norm;
    Tensor passes, table;
  };
  const auto module = std::make_shared<CounterImpl>();
  const auto reset = [&] {
    const torch::NoGradGuard no_grad;
    module->norm->reset_running_stats();
    module->passes.fill_(1);
  };
  const auto buffers = [&] {
    std::vector<Tensor> values;
    for (const Tensor& buffer : module->buffers()) values.push_back(buffer.clone());
    return values;
  };
  const auto f = &CounterImpl::forward;
  const auto plain = [&](const Tensor& x) { return module->forward(module->forward(x)); };
  const auto again = [&](const Tensor& x) { return recompute(*module, f, recompute(*module, f, x)); };
  reset();
  const Outcome wanted = run(*module, plain);
  const auto wanted_buffers = buffers();
  reset();
  const Outcome found = run(*module, again);
  REQUIRE(wanted.dx.equal(found.dx));
  for (size_t i = 0; i < wanted.gradients.size(); ++i)
    REQUIRE(wanted.gradients[i].allclose(found.gradients[i]));
  const auto found_buffers = buffers();
  for (size_t i = 0; i < found_buffers.size(); ++i) REQUIRE(wanted_buffers[i].equal(found_buffers[i]));
  REQUIRE(module->passes.item<float>() == 3);

  SECTION("also where one use is plain and its graph has saved them") {
    reset();
    const Outcome mixed =
        run(*module, [&](const Tensor& x) { return recompute(*module, f, module->forward(x)); });
    REQUIRE(mixed.dx.equal(wanted.dx));
  }
  SECTION("somebody else's change is an error") {
    const Tensor y = recompute(*module, f, torch::randn({4, kSize}));
    module->table.add_(1);
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }), ContainsSubstring("buffer table was changed"));
  }
}

TEST_CASE("what would give wrong gradients through a region is an error that says what to do",
          "[recompute]") {
  torch::manual_seed(1);
  Mlp module;
  const auto f = &MlpImpl::forward;
  const Tensor x = torch::randn({2, kSize}).requires_grad_();

  SECTION("an argument changed afterwards") {
    const Tensor h = x * 1;
    const Tensor y = recompute(*module, f, h);
    h.mul_(2);
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }),
                 ContainsSubstring("MlpImpl was changed in place between forward and backward"));
  }
  SECTION("an argument changed by the function") {
    const Tensor h = x * 1;
    const auto change = [&](Tensor t) { return module(t.mul_(2)); };
    REQUIRE_THAT(message_of([&] { recompute(*module, change, h); }),
                 ContainsSubstring("changes its argument 0 in place") && ContainsSubstring("work on a copy"));
  }
  SECTION("a parameter changed afterwards") {
    const Tensor y = recompute(*module, f, x);
    {
      const torch::NoGradGuard no_grad;
      module->up->bias.add_(1);
    }
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }),
                 ContainsSubstring("parameter up.bias was changed in place"));
  }
  SECTION("a captured tensor that needs a gradient") {
    const Tensor outer = torch::nn::Linear(kSize, kSize)(torch::ones({1, kSize}));
    const Tensor y = recompute(
        *module, [&](const Tensor& t) { return module(t) + outer; }, x);
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }), ContainsSubstring("pass it as an argument"));
    const Tensor leaf = torch::ones({kSize}).requires_grad_();
    const Tensor z = recompute(
        *module,
        [&](const Tensor&) {
          return leaf.view({1, kSize});
        },
        x);
    REQUIRE_THAT(message_of([&] { z.sum().backward(); }), ContainsSubstring("pass it as an argument"));
    // A leaf that is itself the result of the second run.
    const Tensor whole = torch::ones({2, kSize}).requires_grad_();
    int64_t runs = 0;
    const Tensor last = recompute(
        *module, [&](const Tensor& t) { return ++runs == 1 ? module(t) : whole; }, x);
    REQUIRE_THAT(message_of([&] { last.sum().backward(); }), ContainsSubstring("pass it as an argument"));
  }
  SECTION("eval() between forward and backward") {
    const Tensor y = recompute(*module, f, x);
    module->eval();
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }), ContainsSubstring("was switched to eval()"));
  }
  SECTION("a second derivative") {
    const Tensor y = recompute(*module, f, x);
    REQUIRE_THAT(message_of([&] { torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true); }),
                 ContainsSubstring("no second derivative"));
  }
  SECTION("another shape or number of results the second time") {
    int64_t runs = 0;
    const Tensor y = recompute(
        *module, [&](const Tensor& t) { return module(t).narrow(0, 0, ++runs); }, x);
    REQUIRE_THAT(message_of([&] { y.sum().backward(); }), ContainsSubstring("has shape [1, 32] in forward"));
    int64_t calls = 0;
    const auto z = recompute(
        *module, [&](const Tensor& t) { return std::vector<Tensor>(++calls, module(t)); }, x);
    REQUIRE_THAT(message_of([&] { z[0].sum().backward(); }),
                 ContainsSubstring("returned 1 tensors in forward"));
  }
  REQUIRE(detail::get_random_state(at::kCPU).cpu.defined());
}

TEST_CASE("a parameter that is frozen between forward and backward gets no gradient", "[recompute]") {
  torch::manual_seed(1);
  Mlp module;
  const Tensor y = recompute(*module, &MlpImpl::forward, torch::randn({2, kSize}).requires_grad_());
  module->up->bias.requires_grad_(false);
  y.sum().backward();
  CHECK_FALSE(module->up->bias.grad().defined());
  CHECK(module->up->weight.grad().defined());
}

TEST_CASE("an exception in the second run leaves everything as it was", "[recompute]") {
  torch::manual_seed(1);
  Mlp module;
  torch::nn::BatchNorm1d norm(kSize);
  torch::nn::Sequential both(module, norm);
  int runs = 0;
  const auto f = [&](const Tensor& x) {
    const Tensor y = norm(module(x));
    if (++runs == 2) throw std::runtime_error("the second run fails");
    return y;
  };
  Tensor y;
  {
    const Autocast autocast(at::kCPU);
    y = recompute(*both, f, torch::randn({4, kSize}).requires_grad_());
  }
  const Tensor random = detail::get_random_state(at::kCPU).cpu, mean = norm->running_mean.clone();
  REQUIRE_THAT(message_of([&] { y.sum().backward(); }), ContainsSubstring("the second run fails"));
  REQUIRE(detail::get_random_state(at::kCPU).cpu.equal(random));
  REQUIRE_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  REQUIRE(at::autocast::is_autocast_cache_enabled());
  REQUIRE(norm->running_mean.equal(mean));
  REQUIRE(norm->num_batches_tracked.item<int64_t>() == 1);
  REQUIRE_FALSE(module->up->weight.grad().defined());
}

// 12 blocks whose activations are 14 times their input: what is alive at the peak is 12 inputs and one block,
// and at rest the inputs alone.
TEST_CASE("regions keep their arguments only", "[recompute]") {
  constexpr int64_t kBlocks = 12, kRows = 256;
  torch::manual_seed(1);
  std::vector<Mlp> blocks;
  for (int64_t i = 0; i < kBlocks; ++i) blocks.emplace_back(0.1);
  const Tensor x = torch::randn({kRows, kSize});
  const auto bytes = static_cast<int64_t>(x.nbytes());
  int64_t kept[2], peak[2];
  for (const bool again : {false, true}) {
    for (int64_t i = 0; i < kBlocks; ++i) blocks[i]->zero_grad(/*set_to_none=*/false);
    const CountedCpuMemory memory;
    for (int pass = 0; pass < 2; ++pass) {  // gradients exist in the second
      const int64_t before = CountedCpuMemory::live();
      CountedCpuMemory::reset_peak();
      Tensor h = x;
      for (Mlp& block : blocks) h = again ? recompute(*block, &MlpImpl::forward, h) : block(h);
      kept[again] = CountedCpuMemory::live() - before;
      h.sum().backward();
      peak[again] = CountedCpuMemory::peak() - before;
    }
  }
  CAPTURE(bytes, kept[0], kept[1], peak[0], peak[1]);
  constexpr int64_t kRandomState = 6 * 1024;  // of the CPU, as malloc rounds it
  REQUIRE(kept[1] <= kBlocks * (bytes + kRandomState));
  REQUIRE(static_cast<double>(peak[1]) < 0.30 * static_cast<double>(peak[0]));
}

}  // namespace pacer::testing
