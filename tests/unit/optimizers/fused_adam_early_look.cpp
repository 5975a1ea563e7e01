// The look at gradients ahead of the step: the same bits in norm and parameters, whatever was looked at early
// and whatever happened to it since.
#include <cmath>
#include <cstring>

#include "support/catch.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

// Shorter than a unit of the norm, longer, none; in two dtypes, so that there are two tables.
std::vector<Tensor> some_parameters() {
  auto parameters = random_parameters({{5}, {70001}, {7, 3}, {0}, {40000}}, at::kFloat);
  for (const Tensor& half : random_parameters({{33000}, {3}}, at::kBFloat16)) parameters.push_back(half);
  return parameters;
}

struct Guarded {
  explicit Guarded(std::vector<Tensor> own)
      : parameters(std::move(own)), optimizer(parameters, FusedAdamWOptions(0.01)) {
    inputs.guard = std::make_shared<GradientGuard>(at::kCPU);
    inputs.guard->clip_to(0.5);
    inputs.average = 0.25;
  }
  void step() {
    const torch::NoGradGuard no_grad;
    contract(optimizer).prepare(inputs);
    contract(optimizer).conclude(contract(optimizer).enqueue());
  }
  bool look(const std::vector<size_t>& of) {
    std::vector<Tensor> some;
    for (const size_t i : of) some.push_back(parameters[i]);
    return contract(optimizer).look_early(some);
  }
  std::vector<Tensor> parameters;
  FusedAdamW optimizer;
  StepInputs inputs;
};

// Takes a step of both, and compares them.
void expect_same_step(Guarded& early, Guarded& plain) {
  early.step();
  plain.step();
  CHECK(early.inputs.guard->memory().equal(plain.inputs.guard->memory()));  // bytes
  CHECK(difference(snapshot(plain.optimizer), snapshot(early.optimizer)) == "");
}

struct Pair {
  Pair() : early(some_parameters()), plain(clones(early.parameters)) {
    set_random_gradients(early.parameters, plain.parameters);
    CHECK_FALSE(early.look({0}));  // there is no plan yet
    expect_same_step(early, plain);
    set_random_gradients(early.parameters, plain.parameters);
  }
  Guarded early, plain;
};

// Memory that nobody has written to is NaN.
class NanMemory {
 public:
  NanMemory() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }
  NanMemory(const NanMemory&) = delete;
  ~NanMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

// Without telling LibTorch, so that only a new look can see it.
void overwrite(const Tensor& gradient) { std::memset(gradient.mutable_data_ptr(), 0, 4); }

}  // namespace

TEST_CASE("a look in parts and ahead of the step gives the same bits", "[fused_adam]") {
  torch::manual_seed(3);
  Pair pair;
  for (int step = 0; step < 3; ++step) {
    CHECK(pair.early.look({6, 4, 1}));
    CHECK(pair.early.look({2, 3, 0}));
    CHECK(pair.early.look({5}));
    expect_same_step(pair.early, pair.plain);
    set_random_gradients(pair.early.parameters, pair.plain.parameters);
  }
}

TEST_CASE("a look in parts reads no memory that nobody has written to", "[fused_adam]") {
  torch::manual_seed(3);
  const NanMemory nan_memory;
  REQUIRE(torch::empty({3}).isnan().all().item<bool>());
  Pair pair;
  CHECK(pair.early.look({0, 1, 2, 3, 4, 5, 6}));
  expect_same_step(pair.early, pair.plain);
  CHECK(std::isfinite(pair.early.inputs.guard->read().norm));
}

TEST_CASE("the step does not look again at what was seen, and forgets it afterwards", "[fused_adam]") {
  torch::manual_seed(4);
  Pair pair;
  CHECK(pair.early.look({0, 1, 2, 3, 4, 5, 6}));
  pair.plain.step();
  overwrite(pair.early.parameters[1].grad());
  pair.early.step();
  CHECK(pair.early.inputs.guard->read().norm == pair.plain.inputs.guard->read().norm);
  overwrite(pair.plain.parameters[1].grad());
  pair.early.step();
  pair.plain.step();
  CHECK(pair.early.inputs.guard->read().norm == pair.plain.inputs.guard->read().norm);
}

TEST_CASE("the step looks again where an early look missed or lost something", "[fused_adam]") {
  const std::vector<size_t> all = {0, 1, 2, 3, 4, 5, 6};
  using Change = std::function<void(Guarded&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"added to", [](Guarded& one) { one.parameters[1].grad().add_(1); }},
      {"replaced", [](Guarded& one) { one.parameters[4].mutable_grad() = torch::ones({40000}); }},
      {"replaced by a view in another order",
       [](Guarded& one) {
         one.parameters[2].mutable_grad() = torch::ones({3, 7}).t();
       }},
      {"dropped", [](Guarded& one) { one.parameters[6].mutable_grad().reset(); }},
      {"parameter written",
       [](Guarded& one) {
         torch::NoGradGuard no_grad;
         one.parameters[0].mul_(2);
       }},
      {"not finite", [](Guarded& one) { one.parameters[0].grad()[2] = NAN; }},
      {"another average", [](Guarded& one) { one.inputs.average = 0.5; }},
      {"a new parameter",
       [](Guarded& one) {
         Tensor more = torch::ones({9}).requires_grad_();
         more.mutable_grad() = torch::ones({9});
         one.optimizer.add_param_group(torch::optim::OptimizerParamGroup({more}));
       }},
  };
  for (const auto& [name, change] : changes) {
    CAPTURE(name);
    torch::manual_seed(5);
    Pair pair;
    CHECK(pair.early.look(all));
    change(pair.early);
    change(pair.plain);
    expect_same_step(pair.early, pair.plain);
    set_random_gradients(pair.early.parameters, pair.plain.parameters);
    pair.early.look(all);
    expect_same_step(pair.early, pair.plain);
  }
  Pair pair;
  CHECK(pair.early.look({0, 1, 2}));  // the others late
  expect_same_step(pair.early, pair.plain);
}

TEST_CASE("an early look is refused where the step could not use it", "[fused_adam]") {
  torch::manual_seed(6);
  Pair pair;
  CHECK_FALSE(contract(pair.early.optimizer).look_early({torch::ones({3})}));
  pair.early.parameters[2].mutable_grad() = torch::ones({3, 7}).t();
  CHECK_FALSE(pair.early.look({1, 2}));
  pair.early.parameters[2].mutable_grad().reset();
  CHECK_FALSE(pair.early.look({2}));
  pair.early.inputs.guard = nullptr;  // nothing to look for
  pair.early.step();
  CHECK_FALSE(pair.early.look({0}));
  pair.early.inputs.guard = pair.plain.inputs.guard;
  pair.early.inputs.replayable = true;  // the look is part of the graph
  pair.early.step();
  CHECK_FALSE(pair.early.look({0}));
}

}  // namespace pacer::testing
