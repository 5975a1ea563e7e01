// Precision in a Session: what really runs in bf16 and fp16, how the loss scale moves and that it leaves no
// trace in the parameters, and that autocast is put back.
#include <ATen/autocast_mode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/precision.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

// Only element-wise operations, which autocast leaves in fp32: loss = mean of squares of w * x + b.
struct ElementwiseModelImpl : torch::nn::Module {
  ElementwiseModelImpl() {
    torch::manual_seed(6);
    w = register_parameter("w", torch::randn({32}));
    b = register_parameter("b", torch::randn({32}));
  }
  Tensor loss(const Tensor& x) { return (w * x + b).square().mean(); }
  Tensor w, b;
};
TORCH_MODULE(ElementwiseModel);

LossScaleRule scale_rule(double initial, int64_t growth_interval = 1000) {
  LossScaleRule rule;
  rule.initial = initial;
  rule.growth_interval = growth_interval;
  return rule;
}

// Sees the scale by which the loss is multiplied.
class ScaleProbe : public Hook {
 public:
  explicit ScaleProbe(double& scale) : scale_(&scale) {}
  std::string hook_name() const override { return "scale_probe"; }
  Slot slot() const override { return Slot::record; }
  Tensor scale_loss(Tensor loss) override {
    *scale_ = loss.item<double>();
    return loss;
  }

 private:
  double* scale_;
};

}  // namespace

TEMPLATE_TEST_CASE("a loss scale that is a power of two leaves no trace in fp32 parameters",
                   "[session][precision]", FusedAdamW, torch::optim::AdamW) {
  std::vector<Tensor> first;
  for (const double scale : {1.0, 2.0, 1024.0, 65536.0}) {
    for (const bool clips : {false, true}) {
      ElementwiseModel model;
      TestType optimizer(model->parameters(), OptionsOf<TestType>(0.01));
      Session session(*model, optimizer);
      session.use(Precision::fp16(scale_rule(scale)));
      if (clips) session.use(GradientClipping(1e6));  // reaches nothing
      for (int64_t i = 0; i < 10; ++i) {
        torch::manual_seed(i);
        auto [x] = session.begin(torch::randn({3, 32}));
        session.backward(model->loss(x));
        REQUIRE(model->w.grad().abs().max().item<double>() > 0.01 * scale);
        session.step();
      }
      CHECK(session.skipped_steps() == 0);
      if (first.empty()) first = clones(model->parameters());
      CHECK(same_bits(model->parameters(), first));
    }
  }
}

TEMPLATE_TEST_CASE("the loss scale halves after a step that was not finite and doubles after the interval",
                   "[session][precision]", FusedAdamW, torch::optim::AdamW) {
  ElementwiseModel model;
  TestType optimizer(model->parameters(), OptionsOf<TestType>(0.01));
  Session session(*model, optimizer);
  double scale = 0;
  session.use(Precision::fp16(scale_rule(256, 3))).use(ScaleProbe(scale));
  // f: finite, x: not. A skip starts the count anew.
  const std::string steps = "ffffffxffxffff";
  const double scales[] = {256, 256, 256, 512, 512, 512, 1024, 512, 512, 512, 256, 256, 256, 512};
  int64_t skipped = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    CAPTURE(i);
    const auto before = clones(model->parameters());
    auto [x] = session.begin(torch::ones({1, 32}));
    const Tensor loss = (model->w.sum() - model->w.sum().detach()) + 1;  // 1, whatever the parameters
    session.backward(loss);
    CHECK(scale == scales[i]);
    if (steps[i] == 'x') model->w.grad()[31] = HUGE_VAL;
    skipped += steps[i] == 'x';
    CHECK(session.step());
    CHECK(same_bits(before, model->parameters()) == (steps[i] == 'x'));
    CHECK(session.skipped_steps() == skipped);
    CHECK_FALSE(model->w.grad().defined());
  }
}

TEST_CASE("forward really runs in the precision asked for, backward and the rest do not",
          "[session][precision]") {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    auto model = small_model();
    FusedAdamW optimizer(model->parameters());
    Session session(*model, optimizer);
    session.use(type == at::kHalf ? Precision::fp16() : Precision::bf16());
    const auto batch = small_batch(0);
    auto [x, y] = session.begin(batch.first, batch.second);
    const Tensor hidden = model->tokens(x);
    CHECK(hidden.scalar_type() == at::kFloat);
    CHECK(model->head(hidden).scalar_type() == type);
    session.backward(model->loss(x, y));
    CHECK(model->head(hidden).scalar_type() == at::kFloat);
    CHECK(model->head->weight.grad().scalar_type() == at::kFloat);
    session.step();
    session.evaluate([&] { CHECK(model->head(hidden).scalar_type() == type); });
    CHECK(model->head(hidden).scalar_type() == at::kFloat);
    CHECK(model->head->weight.scalar_type() == at::kFloat);
  }
}

TEST_CASE("autocast of the user is put back", "[session][precision]") {
  struct Restore {
    ~Restore() {
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    }
  } const restore;
  auto model = small_model();
  FusedAdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  session.use(Precision::bf16());
  for (const bool enabled : {true, false}) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
    const auto is_the_users = [&] {
      return at::autocast::is_autocast_enabled(at::kCPU) == enabled &&
             at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf;
    };
    const auto is_ours = [] {
      return at::autocast::is_autocast_enabled(at::kCPU) &&
             at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16;
    };
    const auto batch = small_batch(0);
    {
      auto [x, y] = session.begin(batch.first, batch.second);
      CHECK(is_ours());
      session.backward(model->loss(x, y));
      CHECK(is_the_users());
    }
    session.step();
    session.evaluate([&] {
      session.evaluate([&] { CHECK(is_ours()); });
      CHECK(is_ours());
    });
    CHECK(is_the_users());
    CHECK(at::autocast::increment_nesting() == 1);
    CHECK(at::autocast::decrement_nesting() == 0);
  }
}

TEST_CASE("Precision refuses parameters that are fp16 or fp64 themselves", "[session][precision]") {
  for (const at::ScalarType type : {at::kHalf, at::kDouble, at::kBFloat16, at::kFloat}) {
    for (const Precision& made : {Precision::bf16(), Precision::fp16()}) {
      auto model = small_model();
      model->head->to(type);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      Session session(*model, optimizer);
      const std::string message = refusal([&] { session.use(Precision(made)); });
      const bool is_fine = type == at::kFloat || type == at::kBFloat16;
      CHECK((message == "<no exception>") == is_fine);
      if (!is_fine) CHECK(contains(message, c10::toString(type)));
    }
  }
}

TEST_CASE("rules of the loss scale that cannot be are refused", "[session][precision]") {
  GradientGuard guard(at::kCPU);
  const auto message_for = [&](auto field, auto value) {
    LossScaleRule rule;
    rule.*field = value;
    return refusal([&] { guard.scale_loss(rule); });
  };
  using Rule = LossScaleRule;
  for (const double bad : {0.0, 1e-5, 1e39}) CHECK(contains(message_for(&Rule::initial, bad), "initial"));
  for (const double bad : {0.9, 2e6})
    CHECK(contains(message_for(&Rule::growth_factor, bad), "growth_factor"));
  for (const double bad : {-0.5, 0.0, 1.0, 2.0}) {
    CHECK(contains(message_for(&Rule::backoff_factor, bad), "backoff_factor"));
  }
  for (const int64_t bad : {0, -1}) {
    CHECK(contains(message_for(&Rule::growth_interval, bad), "growth_interval"));
  }
  CHECK(message_for(&Rule::backoff_factor, 0.25) == "<no exception>");
}

}  // namespace pacer::testing
