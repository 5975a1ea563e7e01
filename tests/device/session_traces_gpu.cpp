// What must leave no trace on a GPU, either: micro-batches of no tokens and warm-up passes. And what has to:
// each of many small gradients.
#include "support/both_devices.h"
#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/hooks/empty_micro_batches.h"
#include "support/session/two_layers.h"

namespace pacer::testing::session_traces_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);

}  // namespace

TEST_CASE("on a GPU a micro-batch of no tokens whose loss is 0 / 0 leaves no trace",
          "[session][fp8][padding][gpu]") {
  PACER_NEEDS_GPU();
  using empty_micro_batches::trained;
  for (const bool by_tokens : {true, false}) {
    for (const bool in_8_bits : {true, false}) {
      CAPTURE(by_tokens, in_8_bits);
      const auto real = trained({{true}, {true}, {true}, {true}}, by_tokens, in_8_bits, kGpu);
      REQUIRE(real.scales.empty() == !in_8_bits);
      for (const double norm : real.norms) REQUIRE(norm > 0);
      const auto with =
          trained({{true, false}, {false, true}, {true, false}, {false, true}}, by_tokens, in_8_bits, kGpu);
      CHECK(first_difference(with.scales, real.scales) == "");
      CHECK(with.norms == real.norms);
      CHECK(same_bits(with.weights, real.weights));
      const auto windows = trained({{true}, {false}, {true}, {false}}, by_tokens, in_8_bits, kGpu);
      const auto two = trained({{true}, {true}}, by_tokens, in_8_bits, kGpu);
      CHECK(first_difference(windows.scales, two.scales) == "");
      CHECK(same_bits(windows.weights, two.weights));
      CHECK(windows.said.find("trains on no token") != std::string::npos);
    }
  }
}

TEST_CASE("on a GPU a warm-up pass leaves no gradient on parameters outside of the model",
          "[session][gradients][gpu]") {
  PACER_NEEDS_GPU();
  const auto train = [](bool warms_up) {
    auto model = two_layers();
    model->to(kGpu);
    Tensor scale = torch::ones({2}, kGpu).requires_grad_();
    std::vector<Tensor> parameters = model->parameters();
    parameters.push_back(scale);
    FusedAdamW optimizer(parameters, FusedAdamWOptions(0.1));
    const CapturedStderr quiet;  // a parameter outside of the model
    Session session(model, optimizer);
    const Tensor first = batch_of(0, 3).to(kGpu);
    if (warms_up) {
      session.prewarm([&] { return (model->forward(first) * scale * 100).square().mean(); });
      CHECK_FALSE(scale.grad().defined());
    }
    for (int64_t step = 0; step < 3; ++step) {
      auto [x] = session.begin(batch_of(step, 3));
      session.backward((model->forward(x) * scale).square().mean());
      session.step();
    }
    session.finish();
    parameters.front() = model->parameters().front();
    return parameters;
  };
  const auto with = train(true);
  CHECK_FALSE(same_bits(with.back(), torch::ones({2})));
  CHECK(same_bits(with, train(false)));
}

TEST_CASE("on a GPU 512 micro-gradients of 1 have the mean 1 in bf16 and fp16",
          "[session][accumulation][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t given : {512, 300}) {  // the window is complete, or ends early
      CAPTURE(dtype, given);
      auto model = two_layers();
      model->to(kGpu, dtype);
      FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01).betas({0.5, 0.5}));
      Session session(model, optimizer);
      session.use(GradientAccumulation(512)).use(GradientClipping(1e9));
      for (int64_t k = 0; k < given; ++k) {
        auto [x] = session.begin(torch::ones({1}));
        Tensor sum = torch::zeros({}, kGpu);
        for (const Tensor& parameter : model->parameters()) sum = sum + parameter.to(at::kFloat).sum();
        session.backward(sum * x.sum());
        session.step();
      }
      session.finish();
      for (const Tensor& parameter : model->parameters()) {
        CHECK(distance(state_of(optimizer, parameter).exp_avg(), torch::full_like(parameter, 0.5)) == 0);
      }
    }
  }
}

}  // namespace pacer::testing::session_traces_gpu
