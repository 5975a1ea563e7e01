// GradientClipping in a Session: the clipped step against LibTorch's own clipping, and the norm against fp64.
#include <cmath>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

using Catch::Approx;

void clipped_step(Session& session, SmallModel& model, int64_t i) {
  const auto batch = small_batch(i);
  auto [x, y] = session.begin(batch.first, batch.second);
  session.backward(model->loss(x, y));
  session.step();
}

template <class Optimizer>
auto strong_options() {
  if constexpr (std::is_same_v<Optimizer, torch::optim::SGD>) {
    return torch::optim::SGDOptions(0.5).momentum(0.9);
  } else {
    return OptionsOf<Optimizer>(0.01);
  }
}

double norm_in_double(const std::vector<Tensor>& parameters, double factor = 1) {
  double sum = 0;
  for (const Tensor& parameter : parameters) {
    sum += parameter.grad().to(at::kDouble).mul(factor).square().sum().item<double>();
  }
  return std::sqrt(sum);
}

struct BagModelImpl : torch::nn::Module {
  BagModelImpl()
      : table(
            register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).sparse(true)))) {}
  Tensor loss(const Tensor& ids) { return table(ids).square().mean(); }
  torch::nn::Embedding table;
};
TORCH_MODULE(BagModel);

}  // namespace

TEMPLATE_TEST_CASE("a clipped step is LibTorch's clip_grad_norm_ and then the step", "[session][clipping]",
                   FusedAdamW, FusedAdam, torch::optim::AdamW, torch::optim::SGD) {
  for (const double max_norm : {0.05, 1e3}) {
    auto model = small_model(), twin = small_model();
    TestType optimizer(model->parameters(), strong_options<TestType>()),
        peer(twin->parameters(), strong_options<TestType>());
    Session session(*model, optimizer);
    session.use(GradientClipping(max_norm));
    for (int64_t i = 0; i < 6; ++i) {
      clipped_step(session, model, i);
      const auto batch = small_batch(i);
      twin->loss(batch.first, batch.second).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(twin->parameters(), max_norm);
      CHECK((norm > max_norm) == (max_norm < 1));
      // A norm of 500 numbers in fp32 against one in double.
      CHECK(session.gradient_norm() == Approx(norm).epsilon(1e-5));
      peer.step();
      peer.zero_grad();
      // LibTorch divides by norm + 1e-6, which makes its gradients smaller by 1e-6 / norm of themselves; the
      // norm is about 1, and a step about 0.01 long.
      REQUIRE(distance(model->parameters(), twin->parameters()) < 2e-6);
    }
    auto untouched = small_model();
    CHECK(distance(model->parameters(), untouched->parameters()) > 1e-3);
  }
}

TEMPLATE_TEST_CASE("gradient_norm is the norm of the mean gradient before clipping", "[session][clipping]",
                   FusedAdamW, torch::optim::AdamW) {
  for (const int64_t micro_steps : {1, 3, 4}) {
    auto model = small_model(), twin = small_model();
    TestType optimizer(model->parameters(), OptionsOf<TestType>(0.0));
    Session session(*model, optimizer);
    session.use(GradientAccumulation(micro_steps)).use(GradientClipping(0.01));
    for (int64_t i = 0; i < 2 * micro_steps; ++i) {
      clipped_step(session, model, i);
      const auto batch = small_batch(i);
      twin->loss(batch.first, batch.second).backward();
      if ((i + 1) % micro_steps != 0) continue;
      CHECK(session.gradient_norm() ==
            Approx(norm_in_double(twin->parameters(), 1.0 / static_cast<double>(micro_steps))).epsilon(1e-6));
      twin->zero_grad();
    }
  }
  auto model = small_model();
  TestType optimizer(model->parameters());
  Session session(*model, optimizer);
  clipped_step(session, model, 0);
  CHECK(contains(refusal([&] { session.gradient_norm(); }), "add GradientClipping"));
}

TEST_CASE("hooks of parameters clip by value: each gradient of a rank before it is added to others",
          "[session][clipping][ranks]") {
  static constexpr double kLimit = 0.01;
  const auto clip_by_value = [](SmallModel& model) {
    for (const Tensor& parameter : model->parameters()) {
      parameter.register_hook([](const Tensor& gradient) { return gradient.clamp(-kLimit, kLimit); });
    }
  };
  // On one rank what clip_grad_value_ does, to the bit.
  auto model = small_model(), twin = small_model();
  clip_by_value(model);
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01)),
      peer(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer);
  bool was_clipped = false;
  for (int64_t i = 0; i < 4; ++i) {
    clipped_step(session, model, i);
    const auto [x, y] = small_batch(i);
    twin->loss(x, y).backward();
    for (const Tensor& parameter : twin->parameters()) {
      was_clipped = was_clipped || parameter.grad().abs().max().item<double>() > kLimit;
    }
    torch::nn::utils::clip_grad_value_(twin->parameters(), kLimit);
    peer.step();
    peer.zero_grad();
    CHECK(same_bits(model->parameters(), twin->parameters()));
  }
  session.finish();
  CHECK(was_clipped);

  // On two ranks with two micro-batches each the mean of four clipped gradients.
  const auto worlds = Communicator::in_process(2);
  std::vector<SmallModel> models{small_model(), small_model()};
  CHECK(first_of(run_ranks(2, [&](int rank) {
          SmallModel& own = models[static_cast<size_t>(rank)];
          clip_by_value(own);
          torch::optim::SGD descent(own->parameters(), torch::optim::SGDOptions(0.5));
          Session of_rank(own, descent, worlds[static_cast<size_t>(rank)]);
          of_rank.use(GradientAccumulation(2));
          for (int64_t i = 0; i < 2; ++i) clipped_step(of_rank, own, 2 * rank + i);
          of_rank.finish();
        })) == "");
  auto whole = small_model();
  const auto before = small_model();
  std::vector<Tensor> sums;
  for (const Tensor& parameter : whole->parameters()) sums.push_back(torch::zeros_like(parameter).detach());
  for (int64_t i = 0; i < 4; ++i) {
    whole->zero_grad();
    const auto [x, y] = small_batch(i);
    whole->loss(x, y).backward();
    for (size_t p = 0; p < sums.size(); ++p) sums[p] += whole->parameters()[p].grad().clamp(-kLimit, kLimit);
  }
  for (size_t p = 0; p < sums.size(); ++p) {
    CHECK(distance(models[0]->parameters()[p], before->parameters()[p] - 0.125 * sums[p]) < 1e-7);
    CHECK(same_bits(models[0]->parameters()[p], models[1]->parameters()[p]));
  }
}

TEST_CASE("sparse gradients work, and are refused where they would have to be clipped",
          "[session][clipping]") {
  const Tensor ids = torch::tensor({{1, 2}, {2, 5}});
  BagModel model, twin;
  {
    const at::NoGradGuard no_grad;
    twin->table->weight.copy_(model->table->weight);
  }
  torch::optim::SGD optimizer(model->parameters(), 0.5), peer(twin->parameters(), 0.5);
  {
    Session session(*model, optimizer);
    session.use(GradientAccumulation(2));
    for (int i = 0; i < 4; ++i) {
      auto [x] = session.begin(ids);
      session.backward(model->loss(x));
      session.step();
    }
    CHECK(session.progress().step == 2);
  }
  for (int i = 0; i < 2; ++i) {
    twin->loss(ids).backward();
    peer.step();
    peer.zero_grad();
  }
  CHECK(distance(model->table->weight, twin->table->weight) < 1e-6);

  const Tensor before = model->table->weight.detach().clone();
  Session session(*model, optimizer);
  session.use(GradientClipping(1.0));
  auto [x] = session.begin(ids);
  session.backward(model->loss(x));
  CHECK(contains(refusal([&] { session.step(); }), "sparse gradient"));
  CHECK(same_bits(model->table->weight, before));
  CHECK(session.progress().step == 0);
}

}  // namespace pacer::testing
