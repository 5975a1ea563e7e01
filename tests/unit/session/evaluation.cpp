// Passes outside the loop: evaluation and prewarm, which must leave no trace, also where something throws.
#include <stdexcept>

#include <ATen/autocast_mode.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/precision.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

void train_one(Session& session, SmallModel& model, const std::pair<Tensor, Tensor>& batch) {
  auto [x, y] = session.begin(batch.first, batch.second);
  session.backward(model->loss(x, y));
  session.step();
}

// Fails when a forward pass begins, once told to.
class FailingForward : public Hook {
 public:
  explicit FailingForward(const bool& fails) : fails_(&fails) {}
  std::string hook_name() const override { return "failing_forward"; }
  Slot slot() const override { return Slot::record; }
  void forward_begin(const Progress&) override {
    if (*fails_) throw std::runtime_error("in forward_begin");
  }

 private:
  const bool* fails_;
};

}  // namespace

TEST_CASE("evaluation runs without gradients in eval mode, and puts everything back", "[session]") {
  auto model = small_model_with_gates(LayerDropOptions().theta_bar(0.01).gamma(100), 0.5);
  model->drop->eval();  // a part that the user keeps in eval mode
  FusedAdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  session.use(model->layer_drop).use(Precision::bf16());
  train_one(session, model, small_batch(0));
  const auto batch = small_batch(1);
  const auto evaluate = [&] {
    CHECK(at::autocast::is_autocast_enabled(at::kCPU));
    CHECK_FALSE(model->is_training());
    return model->loss(batch.first, batch.second);
  };
  const Tensor loss = session.evaluate(evaluate);
  CHECK_FALSE(loss.requires_grad());
  CHECK(loss.equal(session.evaluate(evaluate)));
  CHECK(model->is_training());
  CHECK(model->layer_drop->is_training());
  CHECK(model->head->is_training());
  CHECK_FALSE(model->drop->is_training());
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(torch::GradMode::is_enabled());
}

TEST_CASE("prewarm leaves no trace", "[session]") {
  auto model = small_model_with_gates(LayerDropOptions().theta_bar(0.01).gamma(100), 0.5),
       twin = small_model_with_gates(LayerDropOptions().theta_bar(0.01).gamma(100), 0.5);
  FusedAdamW optimizer(model->parameters()), peer(twin->parameters());
  const auto full = small_batch(9, 4);
  for (auto* each : {&model, &twin}) {
    torch::manual_seed(5);
    Session session(**each, each == &model ? optimizer : peer);
    session.use((*each)->layer_drop).use(GradientAccumulation(2)).use(Precision::bf16());
    for (int64_t i = 0; i < 4; ++i) {
      if (each == &model && i % 2 == 0) {
        session.prewarm([&] {
          for (int64_t l = 0; l < 3; ++l) CHECK(model->layer_drop->keeps(l));
          return model->loss(full.first, full.second);
        });
        CHECK_THROWS(session.prewarm([]() -> Tensor { throw std::runtime_error("user"); }));
        CHECK(contains(refusal([&] { session.prewarm([] { return Tensor(); }); }), "returns a loss"));
      }
      train_one(session, *each, small_batch(i));
    }
    CHECK(session.progress().step == 2);
  }
  CHECK(same_bits(parameters_of(model), parameters_of(twin)));
}

TEST_CASE("an evaluation whose hooks fail puts everything back", "[session]") {
  auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  bool fails = false;
  Session session(*model, optimizer);
  session.use(Precision::bf16()).use(FailingForward(fails));
  train_one(session, model, small_batch(0));
  fails = true;
  CHECK_THROWS_AS(session.evaluate([] {}), std::runtime_error);
  CHECK(model->is_training());
  CHECK(model->head->is_training());
  CHECK(torch::GradMode::is_enabled());
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  const auto batch = small_batch(1);
  CHECK_THROWS_AS(session.begin(batch.first, batch.second), std::runtime_error);
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  fails = false;
  train_one(session, model, batch);
  CHECK(session.progress().step == 2);
}

TEST_CASE("prewarm makes the optimizer's state without taking a step", "[session]") {
  auto model = small_model(), twin = small_model();
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01)),
      peer(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer), plain(*twin, peer);
  const auto batch = small_batch(0);
  session.prewarm([&] { return model->loss(batch.first, batch.second); });
  CHECK(optimizer.state().size() == model->parameters().size());
  for (const Tensor& parameter : model->parameters()) {
    CHECK_FALSE(parameter.grad().defined());
    CHECK(state_of(optimizer, parameter).step() == 0);
    CHECK(state_of(optimizer, parameter).exp_avg().abs().sum().item<float>() == 0);
  }
  for (int64_t i = 0; i < 3; ++i) {
    train_one(session, model, small_batch(i));
    train_one(plain, twin, small_batch(i));
  }
  CHECK(same_bits(parameters_of(model), parameters_of(twin)));
}

}  // namespace pacer::testing
