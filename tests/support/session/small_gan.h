// A convolutional GAN with batch norm as a program of two Sessions, small enough for tests: what its loop does, and
// everything that its checkpoints hold. Batches are functions of the step and the rank; a rank that is alone draws its
// noise from the default generator.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/resume_together.h>

#include "support/session/small_run.h"

namespace pacer::testing {

constexpr int64_t kGanBatch = 4;

// Noise [N, 4, 1, 1] -> pictures [N, 1, 8, 8].
inline torch::nn::Sequential small_generator(int64_t channels = 6) {
  using torch::nn::ConvTranspose2d;
  using torch::nn::ConvTranspose2dOptions;
  torch::manual_seed(7);
  return torch::nn::Sequential(ConvTranspose2d(ConvTranspose2dOptions(4, channels, 4).bias(false)),
                               torch::nn::BatchNorm2d(channels), torch::nn::ReLU(),
                               ConvTranspose2d(ConvTranspose2dOptions(channels, 1, 4).stride(2).padding(1)),
                               torch::nn::Tanh());
}

// Pictures [N, 1, 8, 8] -> [N, 1].
inline torch::nn::Sequential small_discriminator() {
  using torch::nn::Conv2d;
  using torch::nn::Conv2dOptions;
  torch::manual_seed(8);
  return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 4, 4).stride(2).padding(1)), torch::nn::LeakyReLU(),
                               Conv2d(Conv2dOptions(4, 6, 4).stride(2).padding(1).bias(false)),
                               torch::nn::BatchNorm2d(6), torch::nn::LeakyReLU(), torch::nn::Flatten(),
                               torch::nn::Linear(24, 1));
}

// [N, 1, 8, 8], between -1 and 1.
inline torch::Tensor small_pictures(int64_t number) {
  return torch::arange(kGanBatch * 64, at::kFloat)
      .add(static_cast<double>(7 * number))
      .mul(0.3)
      .sin()
      .view({kGanBatch, 1, 8, 8});
}

// [N, 4, 1, 1], a function of the number.
inline torch::Tensor small_noise(int64_t number) {
  return torch::arange(kGanBatch * 4, at::kFloat)
      .add(static_cast<double>(5 * number))
      .mul(1.7)
      .sin()
      .view({kGanBatch, 4, 1, 1});
}

struct SmallGanOptions {
  int critic_steps = 1;  // of the discriminator, for each of the generator
  int64_t every = 1;     // of both Checkpoints
  int64_t keep = 3;
  bool synchronous = true;
  bool stop_on_signal = false;
  int64_t channels = 6;  // of the generator
  at::ScalarType dtype = at::kFloat;
  bool is_saved = true;  // has Checkpoints
};

template <class Optimizer, class Options>
class SmallGanOf {
 public:
  SmallGanOf(const std::string& folder, SmallGanOptions options = {},
             std::shared_ptr<Communicator> world = Communicator::alone(at::kCPU))
      : generator(small_generator(options.channels)),
        discriminator(small_discriminator()),
        of_generator(generator->parameters(), Options(0.01)),
        of_discriminator(discriminator->parameters(), Options(0.02)),
        discriminates(discriminator, of_discriminator, world),
        generates(generator, of_generator, world),
        options_(options),
        world_(std::move(world)) {
    generator->to(options.dtype);
    discriminator->to(options.dtype);
    discriminates.use(PartsProbe(of_discriminates_));
    generates.use(PartsProbe(of_generates_));
    if (!options.is_saved) return;
    const CheckpointsOptions checkpoints = CheckpointsOptions("")
                                               .every(options.every)
                                               .keep(options.keep)
                                               .synchronous(options.synchronous)
                                               .stop_on_signal(options.stop_on_signal);
    discriminates.use(Checkpoints(CheckpointsOptions(checkpoints).folder(folder + "/discriminator")));
    generates.use(Checkpoints(CheckpointsOptions(checkpoints).folder(folder + "/generator")));
  }

  std::optional<int64_t> resume(const ResumeOptions& options = {}) {
    return resume_together({&discriminates, &generates}, options);
  }

  void step_discriminator() {
    of_discriminator.zero_grad();
    const int64_t number = number_of(discriminates);
    auto [real, noise] = discriminates.begin(small_pictures(number).to(options_.dtype), noise_of(number));
    const torch::Tensor fake = generator->forward(noise).detach();
    const torch::Tensor loss = torch::softplus(-discriminator->forward(real)).mean() +
                               torch::softplus(discriminator->forward(fake)).mean();
    discriminates.backward(loss);
    discriminates.step();
    losses.push_back(loss.item<double>());
  }
  void step_generator() {
    auto [noise] = generates.begin(noise_of(1000 + number_of(generates)));
    const torch::Tensor loss = torch::softplus(-discriminator->forward(generator->forward(noise))).mean();
    generates.backward(loss);
    generates.step();
    losses.push_back(loss.item<double>());
  }
  void round() {
    for (int step = 0; step < options_.critic_steps; ++step) step_discriminator();
    step_generator();
  }
  void finish() {
    discriminates.finish();
    generates.finish();
  }

  std::vector<detail::TrainingState> state() {
    return {copied(detail::export_state(*of_discriminates_)), copied(detail::export_state(*of_generates_))};
  }

 private:
  int64_t number_of(const Session& session) const {
    return session.progress().step * world_->world_size() + world_->rank();
  }
  torch::Tensor noise_of(int64_t number) const {
    return (world_->world_size() == 1 ? torch::randn({kGanBatch, 4, 1, 1}) : small_noise(number))
        .to(options_.dtype);
  }

 public:
  torch::nn::Sequential generator, discriminator;
  Optimizer of_generator, of_discriminator;
  Session discriminates, generates;
  std::vector<double> losses;  // in the order of the steps

 private:
  SmallGanOptions options_;
  std::shared_ptr<Communicator> world_;
  SessionParts* of_discriminates_ = nullptr;
  SessionParts* of_generates_ = nullptr;
};

using SmallGan = SmallGanOf<FusedAdam, FusedAdamOptions>;

inline std::string first_difference(const std::vector<detail::TrainingState>& a,
                                    const std::vector<detail::TrainingState>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string difference = first_difference(a[i], b[i]);
    if (!difference.empty()) return (i == 0 ? "discriminator: " : "generator: ") + difference;
  }
  return "";
}

}  // namespace pacer::testing
