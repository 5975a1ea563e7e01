// Clipping by the norm in step(), without a Session.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/utils/clip_grad.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/own_optimizers.h"

namespace pacer::testing::clip_gradient_norm {
namespace {

struct Run {
  explicit Run(const RegisteredOptimizer& form, at::ScalarType dtype) {
    torch::manual_seed(3);
    NamedParameters names;
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{6, 64}, {64}, {32, 4}}) {
      parameters.push_back(torch::randn(shape).to(dtype).requires_grad_());
      names.insert("p" + std::to_string(parameters.size()), parameters.back());
    }
    optimizer = form.make(names, nullptr);
  }
  FusedOptimizer& fused() const { return dynamic_cast<FusedOptimizer&>(*optimizer); }
  void set_gradients(int step, double scale) const {
    torch::manual_seed(100 + static_cast<uint64_t>(step));
    for (const Tensor& parameter : parameters) {
      parameter.mutable_grad() = (scale * torch::randn(parameter.sizes())).to(parameter.scalar_type());
    }
  }
  std::vector<Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

}  // namespace

TEST_CASE("a step clips as torch's clip_grad_norm_ before it does", "[optimizer][clipping]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (form.dtype != at::kFloat) continue;
    CAPTURE(form.name);
    const Run clipped(form, at::kFloat), by_hand(form, at::kFloat);
    clipped.fused().clip_gradient_norm(1.5);
    CHECK(clipped.fused().gradient_norm() == 0);
    for (int step = 0; step < 6; ++step) {
      const double scale = step % 2 == 0 ? 1 : 0.01;  // a norm of 24, and of .24
      clipped.set_gradients(step, scale), by_hand.set_gradients(step, scale);
      const Tensor before = clipped.parameters[0].grad().clone();
      const double norm = torch::nn::utils::clip_grad_norm_(by_hand.parameters, 1.5);
      clipped.optimizer->step(), by_hand.optimizer->step();
      CHECK(std::abs(clipped.fused().gradient_norm() - norm) < 1e-5 * norm);
      CHECK(same_bits(clipped.parameters[0].grad(), before));
    }
    // torch adds 1e-6 to the norm; 8 bits round what is next to a border to either side.
    const double bound = form.name.find("8 bits") == std::string::npos ? 2e-5 : 2e-3;
    for (size_t i = 0; i < clipped.parameters.size(); ++i) {
      const Tensor difference = (clipped.parameters[i] - by_hand.parameters[i]).detach();
      CHECK(difference.abs().max().item<double>() < bound);
    }
  }
}

TEST_CASE("the norm is that of all groups in double, and the factor min(1, max / norm)",
          "[optimizer][clipping]") {
  const Tensor a = torch::zeros({3}, at::kDouble).requires_grad_(),
               b = torch::zeros({}, at::kDouble).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{a}, std::make_unique<FusedSgdOptions>(1.0));
  groups.emplace_back(std::vector<Tensor>{b}, std::make_unique<FusedSgdOptions>(2.0));
  FusedSgd optimizer(groups, FusedSgdOptions(1.0));
  optimizer.clip_gradient_norm(2.5);
  const auto step = [&](double scale) {
    a.mutable_grad() = scale * torch::tensor({1.0, 2.0, 2.0}, at::kDouble);
    b.mutable_grad() = scale * torch::full({}, 4.0, at::kDouble);
    optimizer.step();
  };
  step(1);  // the norm is 5
  CHECK(optimizer.gradient_norm() == 5);
  CHECK(a.eq(torch::tensor({-0.5, -1.0, -1.0}, at::kDouble)).all().item<bool>());
  CHECK(b.item<double>() == -4);
  step(0.25);  // 1.25
  CHECK(optimizer.gradient_norm() == 1.25);
  CHECK(b.item<double>() == -6);
  optimizer.clip_gradient_norm(0.625);  // another norm, from now on
  step(0.25);
  CHECK(b.item<double>() == -7);
  optimizer.clip_gradient_norm(0);
  step(1);
  CHECK(b.item<double>() == -15);
  CHECK(message_of([&] { (void)optimizer.gradient_norm(); }).find("call that first") != std::string::npos);
}

TEST_CASE("clipping does without the parameters of an empty group", "[optimizer][clipping]") {
  const Tensor a = torch::zeros({2}).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{});
  groups.emplace_back(std::vector<Tensor>{a});
  FusedSgd optimizer(groups, FusedSgdOptions(1.0));
  optimizer.clip_gradient_norm(1);
  a.mutable_grad() = torch::tensor({3.0f, 4.0f});
  optimizer.step();
  CHECK(optimizer.gradient_norm() == 5);
  CHECK(torch::allclose(a.detach(), torch::tensor({-0.6f, -0.8f})));
}

TEST_CASE("gradients that are not finite change nothing where they are clipped", "[optimizer][clipping]") {
  const RegisteredOptimizer form = own_optimizers_without_ranks().front();
  const Run run(form, form.dtype);
  run.fused().clip_gradient_norm(1);
  run.set_gradients(0, 1);
  run.optimizer->step();
  run.set_gradients(1, 1);
  run.parameters[1].grad()[3] = std::numeric_limits<float>::infinity();
  const Tensor before = run.parameters[0].detach().clone();
  run.optimizer->step();
  CHECK(same_bits(run.parameters[0].detach(), before));
  CHECK(run.fused().skipped_steps() == 1);
  CHECK(std::isinf(run.fused().gradient_norm()));
  run.set_gradients(2, 1);
  run.optimizer->step();
  CHECK_FALSE(same_bits(run.parameters[0].detach(), before));
  CHECK(std::isfinite(run.fused().gradient_norm()));
}

TEST_CASE("clip_gradient_norm goes with a moved optimizer, and not with a Session",
          "[optimizer][clipping][mistakes]") {
  torch::nn::Linear model(2, 2);
  FusedAdam first(model->named_parameters(), FusedAdamOptions(0.1));
  first.clip_gradient_norm(1);
  FusedAdam optimizer(std::move(first));
  for (const Tensor& parameter : model->parameters())
    parameter.mutable_grad() = torch::ones_like(parameter.detach());
  optimizer.step();
  CHECK(optimizer.gradient_norm() == std::sqrt(6.0));
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    CHECK(message_of([&] { optimizer.clip_gradient_norm(wrong); }).find("needs a finite norm") !=
          std::string::npos);
  }
  {
    FusedAdam fresh(model->named_parameters(), FusedAdamOptions(0.1));  // that has taken no step
    fresh.zero_grad();
    fresh.clip_gradient_norm(1);
    Session session(model, fresh);
    const auto [x] = session.begin(torch::ones({1, 2}));
    session.backward(model->forward(x).sum());
    CHECK(message_of([&] { session.step(); }).find("use GradientClipping") != std::string::npos);
    fresh.clip_gradient_norm(0);
    CHECK(session.step());
    session.finish();
  }
  optimizer.zero_grad();
  {
    Session session(model, optimizer);
    const auto [x] = session.begin(torch::ones({1, 2}));
    session.backward(model->forward(x).sum());
    CHECK(message_of([&] { session.step(); }).find("use GradientClipping") != std::string::npos);
    optimizer.clip_gradient_norm(0);
    CHECK(session.step());
    session.finish();
  }
  OneBitAdam onebit(model->parameters(), OneBitAdamOptions(0.1).freeze_step(2));
  CHECK(message_of([&] { onebit.clip_gradient_norm(1); }).find("ranks clip together") != std::string::npos);
}

}  // namespace pacer::testing::clip_gradient_norm
