// The training loop. Time is measured around training only: the clock stands still during validation, and the
// device is synchronised wherever it is read.
#include "training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/cuda.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "arms.h"
#include "gpt.h"
#include "machine_name.h"

namespace convergence {
namespace {

constexpr int64_t kTrainingPoints = 200;         // of the training curve
constexpr int64_t kStepsBetweenGpuSamples = 10;  // the optimizer is timed alone in one step of these

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

GptConfig gpt_config(const Settings& settings) {
  return {settings.layers, settings.width, settings.heads, settings.sequence};
}

// Runs the lifetime of the object under bfloat16 autocast where `enabled`.
class Autocast {
 public:
  Autocast(at::DeviceType device, bool enabled) : device_(device), enabled_(enabled) {
    if (!enabled_) return;
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!enabled_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_;
};

// The state of one run, and the steps on it.
class Trainer {
 public:
  Trainer(const Arm& arm, uint64_t seed, const Settings& settings, const Machine& machine,
          const Corpus& corpus)
      : settings_(settings), corpus_(corpus), device_(machine.device), seed_(seed) {
    torch::manual_seed(seed);
    model_ = Gpt(gpt_config(settings));  // on the CPU first: the same weights for every device
    model_->to(device_);
    OptimizerRecipe recipe{{}, {}, settings.learning_rate, settings.weight_decay};
    for (const auto& parameter : model_->parameters()) {
      (parameter.dim() >= 2 ? recipe.decayed : recipe.undecayed).push_back(parameter);
    }
    optimizer_ = arm.make_optimizer(recipe);
    loss_sum_ = torch::zeros({}, torch::TensorOptions(device_));
    // The first forward and backward pay for libraries being loaded and memory pools being filled. That is no
    // arm's cost, so it happens before the clock starts; nothing is learned from it.
    forward(batch_offsets(seed_, 0, settings_.batch, corpus_, settings_.sequence)).backward();
    optimizer_->zero_grad();
    synchronize();
  }

  // One optimizer step; its loss is added up on the device.
  void step(int64_t number) {
    const double learning_rate = learning_rate_at(number, settings_.steps(), settings_.learning_rate);
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(learning_rate);
    optimizer_->zero_grad();
    const auto loss = forward(batch_offsets(seed_, number, settings_.batch, corpus_, settings_.sequence));
    loss.backward();
    if (settings_.clip > 0.0) torch::nn::utils::clip_grad_norm_(model_->parameters(), settings_.clip);
    step_optimizer(number);
    loss_sum_ += loss.detach();
    ++steps_in_sum_;
  }

  // Mean training loss since the last call; waits for the device.
  double take_mean_loss() {
    const double mean = loss_sum_.item<double>() / static_cast<double>(steps_in_sum_);
    loss_sum_.zero_();
    steps_in_sum_ = 0;
    return mean;
  }

  double validation_loss() {
    const torch::NoGradGuard no_grad;
    const auto offsets = validation_offsets(corpus_, settings_.validation_sequences, settings_.sequence);
    double sum = 0.0;
    for (size_t begin = 0; begin < offsets.size(); begin += static_cast<size_t>(settings_.batch)) {
      const size_t end = std::min(offsets.size(), begin + static_cast<size_t>(settings_.batch));
      const std::vector<int64_t> part(offsets.begin() + begin, offsets.begin() + end);
      sum += forward(part).item<double>() * static_cast<double>(part.size());
    }
    return sum / static_cast<double>(offsets.size());
  }

  double median_optimizer_seconds() const { return median(optimizer_seconds_); }

 private:
  // Mean loss over the sequences that begin at these offsets.
  torch::Tensor forward(const std::vector<int64_t>& offsets) {
    const int64_t sequence = settings_.sequence;
    const auto text = torch::empty({static_cast<int64_t>(offsets.size()), sequence + 1}, torch::kUInt8);
    for (size_t i = 0; i < offsets.size(); ++i) {
      std::copy_n(corpus_.bytes.begin() + offsets[i], sequence + 1,
                  text.data_ptr<uint8_t>() + static_cast<int64_t>(i) * (sequence + 1));
    }
    const auto bytes = text.to(device_).to(torch::kInt64);
    const Autocast autocast(device_.type(), settings_.precision == "bfloat16");
    return next_byte_loss(model_->forward(bytes.narrow(1, 0, sequence)), bytes.narrow(1, 1, sequence));
  }

  // On a GPU, timing one step alone needs two synchronisations; only every tenth step pays for them.
  void step_optimizer(int64_t number) {
    const bool timed = device_.is_cpu() || number % kStepsBetweenGpuSamples == kStepsBetweenGpuSamples - 1;
    if (timed) synchronize();
    const auto start = Clock::now();
    optimizer_->step();
    if (!timed) return;
    synchronize();
    optimizer_seconds_.push_back(seconds_since(start));
  }

  void synchronize() const {
    if (device_.is_cuda()) torch::cuda::synchronize();
  }

  const Settings& settings_;
  const Corpus& corpus_;
  torch::Device device_;
  uint64_t seed_;
  Gpt model_ = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor loss_sum_;
  int64_t steps_in_sum_ = 0;
  std::vector<double> optimizer_seconds_;
};

}  // namespace

Machine prepare_machine(const Settings& settings) {
  const bool has_cuda = torch::cuda::is_available();
  pacer::require(settings.device != "cuda" || has_cuda,
                 "--device cuda: no CUDA device can be used here; --device cpu always works");
  const bool use_cuda = settings.device != "cpu" && has_cuda;
  pacer::require(settings.precision != "tensorfloat32" || use_cuda,
                 "--precision tensorfloat32 needs a CUDA device; on the CPU take float32 or bfloat16");
  at::globalContext().setAllowTF32CuBLAS(settings.precision == "tensorfloat32");
  if (settings.threads > 0) torch::set_num_threads(static_cast<int>(settings.threads));
  if (!use_cuda) {
    const int threads = at::get_num_threads();
    return {"cpu",
            processor_name() + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads")};
  }
  return {"cuda", graphics_name()};
}

int64_t count_parameters(const Settings& settings) {
  int64_t count = 0;
  for (const auto& parameter : Gpt(gpt_config(settings))->parameters()) count += parameter.numel();
  return count;
}

Run train(const std::string& arm, uint64_t seed, const Settings& settings, const Machine& machine,
          const Corpus& corpus, RunObserver* observer) {
  Trainer trainer(find_arm(arm), seed, settings, machine, corpus);
  Run run;
  run.arm = arm;
  run.seed = seed;
  const int64_t steps = settings.steps();
  const int64_t report_every = std::max<int64_t>(1, steps / kTrainingPoints);
  const int64_t evaluate_every = settings.steps_between_evaluations();
  std::vector<double> step_seconds;  // means over the steps between two training points

  const auto validate = [&](int64_t tokens) {
    run.validation.push_back({tokens, run.seconds, trainer.validation_loss()});
    observer->on_validation(run.validation.back());
  };
  validate(0);
  auto start = Clock::now();
  int64_t reported = 0;
  for (int64_t step = 0; step < steps; ++step) {
    trainer.step(step);
    const int64_t done = step + 1;
    const bool evaluate = done == steps || done % evaluate_every == 0;
    if (!evaluate && done % report_every != 0) continue;
    const double loss = trainer.take_mean_loss();
    const double elapsed = seconds_since(start);
    step_seconds.push_back(elapsed / static_cast<double>(done - reported));
    reported = done;
    run.seconds += elapsed;
    pacer::require<pacer::Error>(std::isfinite(loss), "the training loss of ", arm, " (seed ", seed,
                                 ") is not finite after step ", done, "; lower the learning rate");
    run.training.push_back({done * settings.tokens_per_step(), run.seconds, loss});
    observer->on_training(run.training.back(), learning_rate_at(step, steps, settings.learning_rate));
    if (evaluate) validate(run.training.back().tokens);
    start = Clock::now();
  }
  run.step_seconds = median(step_seconds);
  run.optimizer_seconds = trainer.median_optimizer_seconds();
  return run;
}

}  // namespace convergence
