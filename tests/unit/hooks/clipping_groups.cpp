// GradientClipping of parameter groups by norms of their own, and by norms of other orders, against LibTorch's
// clip_grad_norm_ of the same parameters.
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/hooks/four_groups.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::clipping_groups {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Clips = std::vector<GradientClippingOptions>;

// Notes what other hooks report.
class LateNumbers : public Hook {
 public:
  explicit LateNumbers(std::shared_ptr<std::map<std::string, double>> numbers)
      : numbers_(std::move(numbers)) {}
  std::string hook_name() const override { return "late_numbers"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    for (const auto& [name, number] : report.late_numbers()) (*numbers_)[name] = number.item<double>();
  }

 private:
  std::shared_ptr<std::map<std::string, double>> numbers_;
};

// What LibTorch does to the gradients of the mean.
void clip_as_torch(FourGroupsImpl& model, const Clips& clips) {
  for (const GradientClippingOptions& clip : clips) {
    std::vector<Tensor> parameters;
    for (size_t g = 0; g < model.groups.size(); ++g) {
      if (clip.group() && *clip.group() != static_cast<int64_t>(g)) continue;
      for (const Tensor& parameter : model.groups[g]) {
        // Its infinite norm of an element-less tensor is an error.
        if (parameter.grad().defined() && parameter.numel() > 0) parameters.push_back(parameter);
      }
    }
    torch::nn::utils::clip_grad_norm_(parameters, clip.max_norm(), clip.norm_type());
  }
}

// The largest difference to SGD with LibTorch's clipping, after some steps of several micro-batches.
template <class Optimizer>
double difference_to_torch(const Clips& clips, at::ScalarType dtype, double loss_scale) {
  FourGroups model(dtype), twin(dtype);
  Optimizer optimizer(groups_of<OptionsOf<Optimizer>>(*model, OptionsOf<Optimizer>(0.5).momentum(0.9)),
                      OptionsOf<Optimizer>(0.5).momentum(0.9));
  const auto descent = torch::optim::SGDOptions(0.5).momentum(0.9);
  torch::optim::SGD peer(groups_of<torch::optim::SGDOptions>(*twin, descent), descent);
  Session session(*model, optimizer);
  session.use(GradientAccumulation(2)).use(GradientClipping(clips));
  if (loss_scale != 1) {
    LossScaleRule rule;
    rule.initial = loss_scale;
    session.use(Precision::fp16(rule));
  }
  for (int64_t i = 0; i < 6; ++i) {
    auto [x] = session.begin(torch::full({1}, 0.5 + static_cast<double>(i), dtype));
    session.backward(model->loss(x));
    session.step();
    (0.5 * twin->loss(torch::full({1}, 0.5 + static_cast<double>(i), dtype))).backward();
    if (i % 2 == 0) continue;
    clip_as_torch(*twin, clips);
    peer.step();
    peer.zero_grad();
  }
  session.finish();
  return distance(model->parameters(), twin->parameters());
}

}  // namespace

TEMPLATE_TEST_CASE("groups and orders are clipped as LibTorch's clip_grad_norm_ clips them",
                   "[session][clipping][clip-groups]", FusedSgd, torch::optim::SGD) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    // LibTorch adds 1e-6 to norms, which are from 2 up.
    const double bound = dtype == at::kDouble ? 2e-6 : 4e-6;
    for (const double order : {0.5, 1.0, 2.0, 3.0, 60.0, kInfinity}) {
      CAPTURE(dtype, order);
      if (dtype == at::kFloat && order == 60) continue;  // LibTorch's powers overflow
      CHECK(difference_to_torch<TestType>({GradientClippingOptions(0.2).norm_type(order)}, dtype, 1) < bound);
      CHECK(difference_to_torch<TestType>({GradientClippingOptions(0.2).norm_type(order).group(1),
                                           GradientClippingOptions(0.1).group(0),
                                           GradientClippingOptions(1e6).norm_type(order).group(2),
                                           GradientClippingOptions(1e-3).norm_type(order).group(3)},
                                          dtype, 1) < bound);
    }
    if (dtype == at::kDouble) continue;
    CHECK(difference_to_torch<TestType>({GradientClippingOptions(0.2).norm_type(1).group(1)}, dtype, 64) <
          bound);
  }
}

TEST_CASE("clip factors of groups are exact where the arithmetic is", "[session][clipping][clip-groups]") {
  for (const double order : {1.0, 2.0, kInfinity}) {
    FourGroups model(at::kBFloat16);
    for (const std::vector<Tensor>& group : model->groups) {
      const at::NoGradGuard no_grad;
      for (const Tensor& parameter : group) parameter.zero_();
    }
    FusedSgd optimizer(groups_of<FusedSgdOptions>(*model, FusedSgdOptions(1.0)), FusedSgdOptions(1.0));
    Session session(*model, optimizer);
    // Group 1 has 64 gradients of 0.5: norms of 32, 4 and 0.5.
    session.use(GradientClipping({GradientClippingOptions(0.25).norm_type(order).group(1)}));
    auto [x] = session.begin(torch::ones({1}, at::kBFloat16));
    Tensor sum = torch::zeros({}, at::kBFloat16);
    for (const std::vector<Tensor>& group : model->groups) {
      for (const Tensor& parameter : group) {
        if (parameter.requires_grad()) sum = sum + (parameter * 0.5).sum();
      }
    }
    session.backward(sum * x.sum());
    session.step();
    const double norm = order == 1 ? 32 : order == 2 ? 4 : 0.5;
    CHECK(model->groups[1][0].eq(-0.5 * 0.25 / norm).all().item<bool>());
    CHECK(model->groups[0][0].eq(-0.5).all().item<bool>());
    const double elements = 6 * 64 + 64 + 32 * 4 + 5 + 7;
    CHECK(session.gradient_norm() == Catch::Approx(0.5 * std::sqrt(elements)).epsilon(1e-12));
    session.finish();
  }
}

TEST_CASE("a norm or gradient that is not finite skips the step of all groups",
          "[session][clipping][clip-groups]") {
  const auto moved = [](const GradientClippingOptions& clip, double poison, size_t group) {
    FourGroups model(at::kFloat), before(at::kFloat);
    FusedSgd optimizer(groups_of<FusedSgdOptions>(*model, FusedSgdOptions(0.5)), FusedSgdOptions(0.5));
    Session session(*model, optimizer);
    session.use(GradientClipping({clip}));
    auto [x] = session.begin(torch::ones({1}));
    session.backward(model->loss(x));
    model->groups[group][0].mutable_grad().view({-1})[1] = poison;
    session.step();
    CHECK(optimizer.skipped_steps() == (same_bits(model->parameters(), before->parameters()) ? 1 : 0));
    const bool was_skipped = optimizer.skipped_steps() == 1;
    session.finish();
    return !was_skipped;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double order : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
    CAPTURE(order);
    const auto clip = GradientClippingOptions(1.0).norm_type(order).group(1);
    CHECK(moved(clip, 3, 1));
    CHECK_FALSE(moved(clip, nan, 1));
    CHECK_FALSE(moved(clip, -kInfinity, 1));
    CHECK_FALSE(moved(clip, nan, 0));  // not clipped, and looked at all the same
  }
  // 64^(1 / 0.005) is no double.
  CHECK_FALSE(moved(GradientClippingOptions(1.0).norm_type(0.005).group(1), 3, 1));
  // 3^1000 is none either, but the norm is about 3.
  CHECK(moved(GradientClippingOptions(1.0).norm_type(1000).group(1), 3, 1));
}

TEST_CASE("reports have the norms that groups are clipped by", "[session][clipping][clip-groups]") {
  FourGroups model(at::kFloat);
  FusedSgd optimizer(groups_of<FusedSgdOptions>(*model, FusedSgdOptions(0.5)), FusedSgdOptions(0.5));
  Session session(*model, optimizer);
  const auto norms = std::make_shared<std::map<std::string, double>>();
  session.use(GradientClipping(Clips{GradientClippingOptions(0.1).norm_type(1).group(1)}));
  session.use(LateNumbers(norms));
  auto [x] = session.begin(torch::ones({1}));
  session.backward(model->loss(x));
  const double norm = model->groups[1][0].grad().abs().to(at::kDouble).sum().item<double>();
  session.step();
  session.finish();
  REQUIRE(norms->size() == 1);
  CHECK(norms->at("clipped_norm_1") == Catch::Approx(norm).epsilon(1e-12));
}

TEST_CASE("clipping that cannot be is refused in one sentence", "[session][clipping][clip-groups]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto made = [](Clips clips) { return refusal([&] { GradientClipping hook(std::move(clips)); }); };
  for (const double order : {0.0, -1.0, nan})
    CHECK(contains(made({GradientClippingOptions(1.0).norm_type(order)}), "norm_type > 0"));
  for (const double bound : {0.0, -1.0, nan, kInfinity})
    CHECK(contains(made({GradientClippingOptions(bound).group(0)}), "finite norm > 0"));
  CHECK(contains(made({GradientClippingOptions(1.0).group(-1)}), "counts from 0"));
  CHECK(contains(made({}), "no norm"));
  CHECK(contains(made({GradientClippingOptions(1.0), GradientClippingOptions(1.0).group(0)}), "say of each"));
  CHECK(contains(made({GradientClippingOptions(1.0).group(0), GradientClippingOptions(2.0).group(0)}),
                 "twice"));
  CHECK(
      contains(made({GradientClippingOptions(1.0).norm_type(1).by_previous_norm(true)}), "by_previous_norm"));
  CHECK(contains(made({GradientClippingOptions(1.0).group(0).by_previous_norm(true)}), "by_previous_norm"));

  FourGroups model(at::kFloat);
  const GradientClippingOptions absent = GradientClippingOptions(1.0).group(4);
  {
    FusedSgd optimizer(groups_of<FusedSgdOptions>(*model, FusedSgdOptions(0.5)), FusedSgdOptions(0.5));
    Session session(*model, optimizer);
    CHECK(contains(refusal([&] { session.use(GradientClipping(absent)); }), "parameter group 4"));
    session.use(GradientClipping(GradientClippingOptions(1.0).group(3)));  // nothing was changed
  }
  // Gradients of their ranks differ, so each rank would clip by another factor.
  torch::nn::Linear matrix(torch::nn::LinearOptions(4, 4).bias(false));
  OneBitAdam adam(matrix->parameters(), OneBitAdamOptions(1e-3).freeze_step(10));
  OneBitMuon muon(matrix->parameters());
  for (torch::optim::Optimizer* onebit :
       {static_cast<torch::optim::Optimizer*>(&adam), static_cast<torch::optim::Optimizer*>(&muon)}) {
    Session session(*matrix, *onebit);
    CHECK(contains(refusal([&] { session.use(GradientClipping(GradientClippingOptions(1.0).norm_type(1))); }),
                   "1-bit optimizer"));
  }
}

TEST_CASE("a sparse gradient of a clipped group is refused, and nothing is changed",
          "[session][clipping][clip-groups]") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(9, 4).sparse(true));
  torch::optim::SGD optimizer(table->parameters(), 0.5);
  const Tensor before = table->weight.detach().clone();
  Session session(*table, optimizer);
  session.use(GradientClipping(GradientClippingOptions(1.0).group(0)));
  auto [x] = session.begin(torch::tensor({{1, 2}, {2, 5}}));
  session.backward(table(x).square().mean());
  CHECK(contains(refusal([&] { session.step(); }), "sparse gradient"));
  CHECK(same_bits(table->weight, before));
}

}  // namespace pacer::testing::clipping_groups
