// Clipping of groups, and by other norms, in step(), without a Session.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/utils/clip_grad.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/hooks/four_groups.h"
#include "support/optimizers/optimizers.h"
#include "support/session/own_optimizers.h"

namespace pacer::testing::clip_group_gradient_norm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sgd {
  explicit Sgd(at::ScalarType dtype)
      : model(dtype),
        optimizer(groups_of<FusedSgdOptions>(*model, FusedSgdOptions(1.0)), FusedSgdOptions(1.0)) {}
  void step() {
    optimizer.zero_grad();
    model->loss(torch::ones({1}, model->groups[1][0].scalar_type())).backward();
    optimizer.step();
  }
  // How far the group's first parameter was moved, in lengths of its gradient.
  double factor(size_t g) {
    const Tensor before = model->groups[g][0].detach().to(at::kDouble, false, /*copy=*/true);
    step();
    const Tensor moved = before - model->groups[g][0].detach().to(at::kDouble);
    return moved.norm().item<double>() / model->groups[g][0].grad().to(at::kDouble).norm().item<double>();
  }
  FourGroups model;
  FusedSgd optimizer;
};

}  // namespace

TEST_CASE("step() clips groups and by other norms, on all optimizers, as torch's clip_grad_norm_ before it",
          "[optimizer][clipping][clip-groups]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (form.dtype != at::kFloat) continue;
    for (const double order : {1.0, 3.0, kInfinity}) {
      for (const bool of_group : {false, true}) {
        CAPTURE(form.name, order, of_group);
        torch::manual_seed(3);
        std::vector<Tensor> ours, theirs;
        NamedParameters names, their_names;
        for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{6, 64}, {64}, {32, 4}}) {
          const Tensor value = torch::randn(shape);
          ours.push_back(value.clone().requires_grad_());
          theirs.push_back(value.clone().requires_grad_());
          names.insert("p" + std::to_string(ours.size()), ours.back());
          their_names.insert("p" + std::to_string(ours.size()), theirs.back());
        }
        const auto clipped = form.make(names, nullptr), by_hand = form.make(their_names, nullptr);
        auto& fused = dynamic_cast<FusedOptimizer&>(*clipped);
        of_group ? fused.clip_group_gradient_norm(0, 1.5, order) : fused.clip_gradient_norm(1.5, order);
        for (int step = 0; step < 4; ++step) {
          for (size_t i = 0; i < ours.size(); ++i) {
            ours[i].mutable_grad() = torch::randn(ours[i].sizes()) * (step % 2 == 0 ? 1 : 1e-3);
            theirs[i].mutable_grad() = ours[i].grad().clone();
          }
          const Tensor before = ours[0].grad().clone();
          torch::nn::utils::clip_grad_norm_(of_group ? by_hand->param_groups()[0].params() : theirs, 1.5,
                                            order);
          clipped->step(), by_hand->step();
          CHECK(same_bits(ours[0].grad(), before));
        }
        const double bound = form.name.find("8 bits") == std::string::npos ? 2e-5 : 2e-3;
        for (size_t i = 0; i < ours.size(); ++i) {
          CHECK((ours[i] - theirs[i]).abs().max().item<double>() < bound);
        }
      }
    }
  }
}

TEST_CASE("calls choose which groups are clipped from then on", "[optimizer][clipping][clip-groups]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const double close = dtype == at::kDouble ? 1e-12 : 1e-5;
    Sgd run(dtype);
    run.step();
    const auto norm_of = [&](size_t g, double order) {
      std::vector<Tensor> flat;
      for (const Tensor& p : run.model->groups[g]) {
        if (p.grad().defined()) flat.push_back(p.grad().flatten().to(at::kDouble));
      }
      return torch::linalg_vector_norm(torch::cat(flat), order).item<double>();
    };
    run.optimizer.clip_group_gradient_norm(1, 0.5, 1);
    CHECK(run.factor(1) == Catch::Approx(0.5 / norm_of(1, 1)).epsilon(close));
    CHECK(run.factor(0) == Catch::Approx(1).epsilon(close));
    run.optimizer.clip_group_gradient_norm(2, 0.25, kInfinity);
    CHECK(run.factor(2) == Catch::Approx(0.25 / norm_of(2, kInfinity)).epsilon(close));
    CHECK(run.factor(1) == Catch::Approx(0.5 / norm_of(1, 1)).epsilon(close));
    run.optimizer.clip_group_gradient_norm(1, 0.125);  // another norm, from now on
    CHECK(run.factor(1) == Catch::Approx(0.125 / norm_of(1, 2)).epsilon(close));
    const double all =
        std::sqrt(std::pow(norm_of(0, 2), 2) + std::pow(norm_of(1, 2), 2) + std::pow(norm_of(2, 2), 2));
    CHECK(run.optimizer.gradient_norm() == Catch::Approx(all).epsilon(1e-6));
    run.optimizer.clip_group_gradient_norm(1, 0);
    CHECK(run.factor(1) == Catch::Approx(1).epsilon(close));
    CHECK(run.factor(2) == Catch::Approx(0.25 / norm_of(2, kInfinity)).epsilon(close));
    run.optimizer.clip_group_gradient_norm(2, 0);
    CHECK(run.factor(2) == Catch::Approx(1).epsilon(close));
    CHECK(contains(refusal([&] { (void)run.optimizer.gradient_norm(); }), "call that first"));
    run.optimizer.clip_gradient_norm(0.5);
    CHECK(run.factor(2) == Catch::Approx(0.5 / all).epsilon(1e-5));
  }
}

TEST_CASE("clip_group_gradient_norm refuses what cannot be, and changes nothing",
          "[optimizer][clipping][clip-groups]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Sgd run(at::kDouble);
  FusedSgd& optimizer = run.optimizer;
  const auto refused = [&](size_t group, double max_norm, double order) {
    return refusal([&] { optimizer.clip_group_gradient_norm(group, max_norm, order); });
  };
  CHECK(contains(refused(4, 1, 2), "parameter group 4, but the optimizer has 4"));
  CHECK(contains(refused(4, 0, 2), "parameter group 4"));
  for (const double order : {0.0, -2.0, nan}) CHECK(contains(refused(0, 1, order), "norm_type > 0"));
  for (const double bound : {-1.0, nan, kInfinity}) CHECK(contains(refused(0, bound, 2), "finite norm"));
  CHECK(contains(refusal([&] { optimizer.clip_gradient_norm(1, nan); }), "norm_type > 0"));
  CHECK(run.factor(0) == Catch::Approx(1).epsilon(1e-12));

  optimizer.clip_group_gradient_norm(1, 0.5);
  CHECK(contains(refusal([&] { optimizer.clip_gradient_norm(1); }), "set that to 0 first"));
  const double of_group = run.factor(1);
  CHECK(of_group < 0.2);
  CHECK(run.factor(0) == Catch::Approx(1).epsilon(1e-12));
  optimizer.clip_group_gradient_norm(1, 0);
  for (const double order : {1.0, 2.0}) {
    optimizer.clip_gradient_norm(1, order);
    CHECK(contains(refused(0, 1, 2), "set that to 0 first"));
    CHECK(run.factor(0) < 0.2);
  }
}

TEST_CASE("gradients that are released are not clipped by group, and a Session clips by itself",
          "[optimizer][clipping][clip-groups]") {
  const auto trained = [](Sgd& run, Session& session) {
    auto [x] = session.begin(torch::ones({1}));
    session.backward(run.model->loss(x));
    session.step();
  };
  {
    Sgd run(at::kFloat);
    run.optimizer.clip_group_gradient_norm(1, 1.0);
    Session session(*run.model, run.optimizer);
    CHECK(contains(refusal([&] { session.use(GradientRelease()); }), "clip_gradient_norm needs the norm"));
    CHECK(contains(refusal([&] { trained(run, session); }), "leave it out and use GradientClipping"));
    CHECK(same_bits(run.model->parameters(), FourGroups(at::kFloat)->parameters()));
  }
  Sgd run(at::kFloat);
  Session session(*run.model, run.optimizer);
  session.use(GradientClipping(GradientClippingOptions(1.0).group(1))).use(GradientRelease());
  CHECK(contains(refusal([&] { trained(run, session); }), "GradientRelease updates parameters before"));
}

TEST_CASE("steps that are skipped for a norm are counted on", "[optimizer][clipping][clip-groups]") {
  Sgd run(at::kFloat);
  run.optimizer.clip_group_gradient_norm(1, 1.0, 0.005);  // 64^200 is no double
  const Tensor before = run.model->groups[0][0].detach().clone();
  run.step();
  CHECK(run.optimizer.skipped_steps() == 1);
  CHECK(same_bits(run.model->groups[0][0], before));
  run.optimizer.clip_group_gradient_norm(1, 1.0);
  run.step();
  CHECK(run.optimizer.skipped_steps() == 1);
  CHECK_FALSE(same_bits(run.model->groups[0][0], before));
}

}  // namespace pacer::testing::clip_group_gradient_norm
