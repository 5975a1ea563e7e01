// The one-line change: a small network on made-up data, trained with LibTorch's AdamW and with pacer's. Both
// start from the same weights; the losses stand beside each other, then the time of an optimizer step.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/program.h"

namespace {

constexpr int kSteps = 100;
constexpr int kWidth = 512;

struct Result {
  std::vector<double> losses;     // of every step
  double optimizer_milliseconds;  // of one step; the median
};

// The loop is the user's own; it knows its optimizer only as a torch::optim::Optimizer.
template <class MakeOptimizer>
Result train(MakeOptimizer make_optimizer) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(64, kWidth), torch::nn::GELU(),
                              torch::nn::Linear(kWidth, kWidth), torch::nn::GELU(),
                              torch::nn::Linear(kWidth, 1));
  const auto optimizer = make_optimizer(model->parameters());
  const auto x = torch::randn({128, 64});
  const auto y = torch::sin(x.sum(1, /*keepdim=*/true));

  Result result;
  std::vector<double> milliseconds;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    const auto start = std::chrono::steady_clock::now();
    optimizer->step();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    milliseconds.push_back(elapsed.count());
    result.losses.push_back(loss.item<double>());
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  result.optimizer_milliseconds = milliseconds[kSteps / 2];
  return result;
}

void run() {
  const Result before = train([](const std::vector<torch::Tensor>& parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters,
                                                 torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
  });
  const Result after = train([](const std::vector<torch::Tensor>& parameters) {
    return std::make_unique<pacer::FusedAdamW>(parameters, pacer::FusedAdamWOptions(3e-4).weight_decay(0.1));
  });

  std::printf("step   torch::optim::AdamW   pacer::FusedAdamW\n");
  for (int step = 0; step < kSteps; step += step == 0 ? 19 : 20) {
    std::printf("%4d   %19.6f   %17.6f\n", step + 1, before.losses[step], after.losses[step]);
  }
  std::printf("optimizer step %9.3f ms   %14.3f ms   %.1f times as fast\n", before.optimizer_milliseconds,
              after.optimizer_milliseconds, before.optimizer_milliseconds / after.optimizer_milliseconds);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a small network on made-up data with LibTorch's AdamW and with pacer's: the same losses, a\n"
      "faster optimizer step.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
