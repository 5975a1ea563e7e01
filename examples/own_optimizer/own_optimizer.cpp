// An optimizer of your own, as a skeleton to copy: Lion, in a Session with clipping and a schedule,
// beside AdamW. The rule is in lion_rule.h; what it takes to run it in lion.cpp and lion.cu.
#include <cstdio>
#include <utility>

#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "lion.h"
#include "support/program.h"

namespace {

constexpr int64_t kSteps = 300;

// Trains with the optimizer, and returns the error on held-out data.
template <class Optimizer, class Options>
double train(const Options& options, torch::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  model->to(device);
  const auto direction = torch::randn({16}, device);
  const auto batch = [&](int64_t rows) {
    const auto x = torch::randn({rows, 16}, device);
    return std::make_pair(x, torch::tanh(torch::matmul(x, direction)).unsqueeze(1));
  };
  Optimizer optimizer(model->named_parameters(), options);
  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientClipping(1.0));
  session.use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})));
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto [inputs, wanted] = batch(32);
    auto [x, y] = session.begin(inputs, wanted);
    session.backward(torch::mse_loss(model->forward(x), y));
    session.step();
  }
  session.finish();
  const auto [x, y] = batch(4096);
  const torch::NoGradGuard no_grad;
  const torch::Tensor error = torch::mse_loss(model->forward(x), y);
  return error.item<double>();
}

void run() {
  torch::set_num_threads(1);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const double adamw = train<pacer::FusedAdamW>(pacer::FusedAdamWOptions(1e-2).weight_decay(0.01), device);
  const double lion = train<Lion>(lion_options(3e-3).weight_decay(0.1), device);
  std::printf("held-out error: %.4f with AdamW, %.4f with Lion\n", adamw, lion);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a small network with Lion, an optimizer that is not in pacer, and with AdamW.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
