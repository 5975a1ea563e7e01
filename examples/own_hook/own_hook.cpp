// A hook of your own, as a skeleton to copy: a moving average of the weights (Polyak averaging), evaluated
// beside the weights themselves. It shows everything a hook can need: parts of the Session, a turn after each
// step, numbers for Metrics, state for Checkpoints.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/program.h"

namespace {

class WeightAverage : public pacer::Hook {
 public:
  // Each step: average = decay * average + (1 - decay) * weights; 0 <= decay < 1.
  explicit WeightAverage(double decay) : decay_(decay) {
    pacer::require(decay >= 0 && decay < 1, "WeightAverage: decay must be in [0, 1), not ", decay);
  }

  // Who you are, and when your turn is. Two hooks of one name are refused.
  std::string hook_name() const override { return "weight_average"; }
  pacer::Slot slot() const override { return pacer::Slot::record; }

  // Once, in Session::use: keep what you need, refuse what cannot work.
  void attach(pacer::SessionParts& parts) override {
    const torch::NoGradGuard no_grad;
    for (const auto& item : parts.model().named_parameters()) {
      names_.push_back(item.key());
      weights_.push_back(item.value());
      averages_.push_back(item.value().clone());
    }
  }

  // After each optimizer step. Nothing here waits for a GPU.
  void after_step(pacer::StepReport& report) override {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < weights_.size(); ++i) averages_[i].lerp_(weights_[i], 1 - decay_);
    report.add("average_over_steps", 1 / (1 - decay_));
  }

  // Everything that a resumed run cannot compute anew.
  void save(pacer::NamedTensors& state) const override {
    for (size_t i = 0; i < names_.size(); ++i) state[names_[i]] = averages_[i];
  }
  void load(const pacer::NamedTensors& state) override {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < names_.size(); ++i) {
      const auto& saved = pacer::require_tensor(state, names_[i]);
      pacer::require(saved.sizes() == averages_[i].sizes(), "WeightAverage: \"", names_[i],
                     "\" has another shape");
      averages_[i].copy_(saved);
    }
  }

  // Exchanges weights and averages; call it twice.
  void swap() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < weights_.size(); ++i) {
      const auto copy = weights_[i].clone();
      weights_[i].copy_(averages_[i]);
      averages_[i].copy_(copy);
    }
  }

 private:
  double decay_;
  std::vector<std::string> names_;
  std::vector<torch::Tensor> weights_, averages_;
};

void run() {
  torch::manual_seed(1);
  torch::set_num_threads(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto direction = torch::randn({16});
  const auto noisy_batch = [&](int64_t rows, double noise) {
    const auto x = torch::randn({rows, 16});
    const auto y = torch::tanh(torch::matmul(x, direction)).unsqueeze(1);
    return std::make_pair(x, y + noise * torch::randn_like(y));
  };

  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(1e-2));
  pacer::Session session(*model, optimizer);
  const auto average = std::make_shared<WeightAverage>(0.99);
  session.use(average);  // a shared_ptr, because we want to talk to it later
  for (int step = 0; step < 600; ++step) {
    const auto batch = noisy_batch(16, 0.5);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(torch::mse_loss(model->forward(x), y));
    session.step();
  }
  session.finish();

  const auto held_out = noisy_batch(4096, 0.0);
  const auto error = [&] {
    return session.evaluate(
        [&] { return torch::mse_loss(model->forward(held_out.first), held_out.second).item<double>(); });
  };
  const double of_weights = error();
  average->swap();
  std::printf("held-out error: %.4f with the last weights, %.4f with their average\n", of_weights, error());
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a small network with a hook that averages its weights, and compares both on held-out data.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
