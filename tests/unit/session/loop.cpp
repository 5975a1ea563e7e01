// The Session's own work: the loop without hooks, accumulation, the order of calls, what is refused, and that
// nothing stays switched on after an exception.
#include <cmath>
#include <stdexcept>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/step_report.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

void micro_step(Session& session, SmallModel& model, const std::pair<Tensor, Tensor>& batch) {
  auto [x, y] = session.begin(batch.first, batch.second);
  session.backward(model->loss(x, y));
  session.step();
}

// Which hook point was called, in order.
class Recorder : public Hook {
 public:
  Recorder(std::string name, Slot slot, std::vector<std::string>& calls, bool exclusive = false)
      : name_(std::move(name)), slot_(slot), exclusive_(exclusive), calls_(&calls) {}
  std::string hook_name() const override { return name_; }
  Slot slot() const override { return slot_; }
  bool exclusive() const override { return exclusive_; }
  void attach(SessionParts&) override { note("attach"); }
  void begin(const Progress&, MicroBatch&) override { note("begin"); }
  void forward_begin(const Progress&) override { note("forward_begin"); }
  void forward_end() override { note("forward_end"); }
  Tensor scale_loss(Tensor loss) override {
    note("scale_loss");
    return loss;
  }
  void gradients_ready(const Progress&) override { note("gradients_ready"); }
  void after_step(StepReport&) override { note("after_step"); }
  void finish(const Progress&) override { note("finish"); }

 private:
  void note(const char* what) { calls_->push_back(name_ + " " + what); }
  std::string name_;
  Slot slot_;
  bool exclusive_;
  std::vector<std::string>* calls_;
};

// The identity; its backward fails.
struct Thrower : torch::autograd::Function<Thrower> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("in backward");
  }
};

}  // namespace

TEMPLATE_TEST_CASE("a Session without hooks changes nothing: same bits as the bare loop", "[session]",
                   FusedAdamW, torch::optim::AdamW, torch::optim::SGD) {
  auto bare = small_model(), hosted = small_model();
  const auto options = [] {
    if constexpr (std::is_same_v<TestType, torch::optim::SGD>) {
      return torch::optim::SGDOptions(0.1).momentum(0.9);
    } else {
      return OptionsOf<TestType>(0.01);
    }
  }();
  TestType bare_optimizer(bare->parameters(), options), optimizer(hosted->parameters(), options);
  Session session(*hosted, optimizer);
  for (int64_t i = 0; i < 5; ++i) {
    const auto batch = small_batch(i);
    bare->loss(batch.first, batch.second).backward();
    bare_optimizer.step();
    bare_optimizer.zero_grad();
    micro_step(session, hosted, batch);
    REQUIRE(same_bits(parameters_of(bare), parameters_of(hosted)));
  }
  session.finish();
  CHECK(session.progress().step == 5);
  CHECK(session.progress().tokens == 5 * 2 * kFullLength);
}

TEMPLATE_TEST_CASE("four micro-batches are one batch four times as large", "[session]", FusedAdamW,
                   torch::optim::AdamW) {
  auto whole = small_model(), parts = small_model();
  TestType whole_optimizer(whole->parameters(), OptionsOf<TestType>(0.01)),
      optimizer(parts->parameters(), OptionsOf<TestType>(0.01));
  Session session(*parts, optimizer);
  session.use(GradientAccumulation(4));
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<Tensor> inputs, targets;
    for (int64_t m = 0; m < 4; ++m) {
      const auto batch = small_batch(4 * step + m);
      inputs.push_back(batch.first);
      targets.push_back(batch.second);
      auto [x, y] = session.begin(batch.first, batch.second);
      CHECK(session.progress().micro_step == m);
      session.backward(parts->loss(x, y));
      CHECK(session.step() == (m == 3));
    }
    whole->loss(torch::cat(inputs), torch::cat(targets)).backward();
    whole_optimizer.step();
    whole_optimizer.zero_grad();
  }
  // The same sums in another order: a few units of a step of size lr.
  CHECK(distance(parameters_of(whole), parameters_of(parts)) < 1e-5);
  CHECK(session.progress().step == 3);
}

TEST_CASE("finish steps an incomplete window with the mean of what it has", "[session]") {
  auto model = small_model(), twin = small_model();
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01)),
      peer(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer), pair(*twin, peer);
  session.use(GradientAccumulation(5));
  pair.use(GradientAccumulation(2));
  for (int64_t i = 0; i < 2; ++i) {
    micro_step(session, model, small_batch(i));
    micro_step(pair, twin, small_batch(i));
  }
  CHECK(session.progress().step == 0);
  session.finish();
  session.finish();
  CHECK(session.progress().step == 1);
  CHECK(same_bits(parameters_of(model), parameters_of(twin)));
}

TEST_CASE("unequal micro-batches can count by their tokens", "[session]") {
  for (const bool by_tokens : {false, true}) {
    auto whole = small_model(), parts = small_model();
    FusedAdamW whole_optimizer(whole->parameters(), FusedAdamWOptions(0.01)),
        optimizer(parts->parameters(), FusedAdamWOptions(0.01));
    Session session(*parts, optimizer);
    session.use(GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(by_tokens)));
    const auto small = small_batch(1, 1), large = small_batch(2, 7);
    micro_step(session, parts, small);
    micro_step(session, parts, large);
    whole->loss(torch::cat({small.first, large.first}), torch::cat({small.second, large.second})).backward();
    whole_optimizer.step();
    // The first step of Adam moves by lr times the sign of the gradient, so wrong weights show in few
    // entries.
    CHECK((distance(parameters_of(whole), parameters_of(parts)) < 1e-4) == by_tokens);
    CHECK(session.progress().tokens == 8 * kFullLength);
  }
}

TEST_CASE("the user can say how many tokens count", "[session]") {
  auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  const auto batch = small_batch(0);
  CHECK(contains(refusal([&] { session.count_tokens(3); }), "between begin and backward"));
  {
    auto [x, y] = session.begin(batch.first, batch.second);
    session.count_tokens(3);
    session.backward(model->loss(x, y));
  }
  session.step();
  CHECK(session.progress().tokens == 3);
}

TEST_CASE("hooks run in the order of their slots, whatever the order of use", "[session]") {
  std::vector<std::string> first, second;
  for (auto* calls : {&first, &second}) {
    auto model = small_model();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer);
    std::vector<std::pair<const char*, Slot>> hooks = {
        {"a", Slot::record}, {"b", Slot::data}, {"c", Slot::forward}, {"d", Slot::data}};
    if (calls == &second) std::reverse(hooks.begin(), hooks.end());
    for (const auto& [name, slot] : hooks) session.use(Recorder(name, slot, *calls));
    calls->clear();
    micro_step(session, model, small_batch(0));
    session.finish();
  }
  CHECK(first == second);
  const std::vector<std::string> expected = {
      "b begin",         "d begin",           "c begin",           "a begin",           "b forward_begin",
      "d forward_begin", "c forward_begin",   "a forward_begin",   "b forward_end",     "d forward_end",
      "c forward_end",   "a forward_end",     "b scale_loss",      "d scale_loss",      "c scale_loss",
      "a scale_loss",    "b gradients_ready", "d gradients_ready", "c gradients_ready", "a gradients_ready",
      "b after_step",    "d after_step",      "c after_step",      "a after_step",      "b finish",
      "d finish",        "c finish",          "a finish"};
  CHECK(first == expected);
}

TEST_CASE("what cannot work is refused when it is put together", "[session]") {
  auto model = small_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<std::string> calls;
  Session session(*model, optimizer);
  session.use(GradientClipping(1.0));
  CHECK(contains(refusal([&] { session.use(GradientClipping(2.0)); }), "gradient_clipping"));
  CHECK(contains(refusal([&] { session.use(Recorder("mine", Slot::clip, calls, true)); }), "mine"));
  CHECK(calls.empty());
  CHECK(contains(refusal([&] { session.use(std::shared_ptr<Hook>()); }), "null"));
  CHECK(contains(refusal([] { GradientClipping(0.0); }), "max") == false);
  for (const double bad : {0.0, -1.0, std::nan(""), double(INFINITY)}) {
    CHECK(contains(refusal([&] { GradientClipping{bad}; }), "GradientClipping"));
  }
  CHECK(contains(refusal([] { GradientAccumulation(0); }), "GradientAccumulation"));
  micro_step(session, model, small_batch(0));
  CHECK(contains(refusal([&] { session.use(GradientAccumulation(2)); }), "before"));
  torch::optim::SGD empty(std::vector<Tensor>{}, 0.1);
  CHECK(contains(refusal([&] { Session(*model, empty); }), "parameter"));
}

TEST_CASE("calls out of order are refused and change nothing", "[session]") {
  auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  const auto batch = small_batch(0);
  CHECK(contains(refusal([&] { session.step(); }), "without backward"));
  CHECK(contains(refusal([&] { session.backward(torch::ones({})); }), "without begin"));
  {
    auto [x, y] = session.begin(batch.first, batch.second);
    CHECK(contains(refusal([&] { session.backward(Tensor()); }), "one floating-point number"));
    CHECK(contains(refusal([&] { session.backward(model->forward(x)); }), "one floating-point number"));
    CHECK(contains(refusal([&] { session.backward(torch::ones({})); }), "no parameter"));
    session.backward(model->loss(x, y));
    CHECK(contains(refusal([&] { session.backward(torch::ones({})); }), "without begin"));
    CHECK(contains(refusal([&] { (void)session.begin(batch.first); }), "without step"));
    CHECK(contains(refusal([&] { session.finish(); }), "without step"));
  }
  session.step();
  CHECK(contains(refusal([&] { session.step(); }), "without backward"));
  session.finish();
  CHECK(contains(refusal([&] { (void)session.begin(batch.first); }), "after finish"));
  CHECK(session.progress().step == 1);
}

TEST_CASE("an exception in forward leaves nothing switched on, and the micro-step can be done again",
          "[session]") {
  auto model = small_model(), twin = small_model();
  FusedAdamW optimizer(model->parameters()), peer(twin->parameters());
  Session session(*model, optimizer), calm(*twin, peer);
  for (auto* s : {&session, &calm}) s->use(Precision::bf16()).use(GradientAccumulation(2));
  for (int64_t i = 0; i < 4; ++i) {
    const auto batch = small_batch(i);
    try {
      auto [x, y] = session.begin(batch.first, batch.second);
      CHECK(at::autocast::is_autocast_enabled(at::kCPU));
      throw std::runtime_error("user");
    } catch (const std::runtime_error&) {
    }
    CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    micro_step(session, model, batch);
    micro_step(calm, twin, batch);
    CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  }
  CHECK(session.progress().step == 2);
  CHECK(same_bits(parameters_of(model), parameters_of(twin)));
}

TEST_CASE("an exception in backward drops the window", "[session]") {
  auto model = small_model(), twin = small_model();
  FusedAdamW optimizer(model->parameters()), peer(twin->parameters());
  Session session(*model, optimizer), calm(*twin, peer);
  session.use(GradientAccumulation(2));
  calm.use(GradientAccumulation(2));
  const auto batch = small_batch(0);
  micro_step(session, model, batch);
  {
    auto [x, y] = session.begin(batch.first, batch.second);
    const Tensor loss = model->loss(x, y);
    CHECK_THROWS(session.backward(loss + Thrower::apply(loss)));
  }
  CHECK(session.progress().micro_step == 0);
  for (int64_t i = 0; i < 2; ++i) {
    micro_step(session, model, batch);
    micro_step(calm, twin, batch);
  }
  CHECK(same_bits(parameters_of(model), parameters_of(twin)));
}

}  // namespace pacer::testing
