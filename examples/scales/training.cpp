// The loop is one without a Session, as everyone has it, so that the textbook's optimizer and pacer's get the
// same gradients. 1-bit optimizers average by themselves; for the others the loop does it.
#include "training.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/utils.h>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/schedulers/factor_lr.h>

#include "models.h"
#include "textbook_adam.h"
#include "textbook_lamb.h"

namespace scales {
namespace {

constexpr int64_t kSequences = 8, kHeldOutSequences = 128;  // of each rank's batch, of an evaluation
constexpr int64_t kEvaluations = 5;

using World = std::shared_ptr<pacer::Communicator>;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;

int64_t length_of(TextUnit unit) { return unit == TextUnit::word ? 32 : 64; }

// LAMB as it is customary: biases, gains and the like without decay and without a trust ratio.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> lamb_groups(const LanguageModel& model,
                                                           const Options& options) {
  std::vector<torch::Tensor> matrices, others;
  for (const auto& parameter : model.parameters()) {
    (parameter.dim() > 1 ? matrices : others).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  groups.emplace_back(others, std::make_unique<Options>(Options(options).weight_decay(0).adapt(false)));
  return groups;
}

OptimizerPointer make_optimizer(const Options& options, const LanguageModel& model, const World& world) {
  const double rate = options.learning_rate;
  const bool is_textbook = options.textbook || options.unit == ScaleUnit::tensor;
  switch (options.optimizer) {
    case Optimizer::adamw:
      return std::make_unique<pacer::FusedAdamW>(model.parameters(), pacer::FusedAdamWOptions(rate));
    case Optimizer::lamb: {
      const auto chosen = pacer::FusedLambOptions(rate);
      return std::make_unique<pacer::FusedLamb>(lamb_groups(model, chosen), chosen);
    }
    case Optimizer::onebit_lamb: {
      auto chosen =
          pacer::OneBitLambOptions(rate).freeze_step(options.freeze).bias_correction(true).factor_max(4);
      chosen.block_scales(options.unit == ScaleUnit::block).one_bit(options.unit != ScaleUnit::none);
      chosen.compress_vectors(true);  // what shares a scale is what is studied
      const auto groups = lamb_groups(model, chosen);
      if (is_textbook) return std::make_unique<TextbookOneBitLamb>(groups, chosen, world, options.unit);
      return std::make_unique<pacer::OneBitLamb>(groups, chosen, world);
    }
    case Optimizer::onebit_adam:
      break;
  }
  auto chosen = pacer::OneBitAdamOptions(rate).freeze_step(options.freeze);
  chosen.block_scales(options.unit == ScaleUnit::block).one_bit(options.unit != ScaleUnit::none);
  chosen.compress_vectors(true);
  if (is_textbook) {
    return std::make_unique<TextbookOneBitAdam>(model.parameters(), chosen, world, options.unit);
  }
  return std::make_unique<pacer::OneBitAdam>(model.parameters(), chosen, world);
}

void average_gradients(const LanguageModel& model, pacer::Communicator& world) {
  for (const auto& parameter : model.parameters()) {
    parameter.grad().div_(world.world_size());
    world.all_reduce(parameter.grad()).wait();
  }
}

at::Tensor all_in_one_row(const LanguageModel& model) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model.parameters()) flat.push_back(parameter.detach().flatten());
  return at::cat(flat);
}

// One rank's run.
class Trainer {
 public:
  Trainer(const Options& options, const Text& text, std::shared_ptr<LanguageModel> model, World world)
      : options_(options), text_(text), model_(std::move(model)), world_(std::move(world)) {}

  Outcome run(const std::vector<int64_t>& snapshot_steps) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    const auto optimizer = make_optimizer(options_, *model_, world_);
    const pacer::LearningRateScheduleOptions shape(options_.steps / 10, options_.steps);
    pacer::FactorLR rate(*optimizer,
                         options_.cosine
                             ? pacer::warmup_cosine(shape)
                             : pacer::warmup_linear(pacer::LearningRateScheduleOptions(shape).end_factor(1)));
    const bool averages =
        options_.optimizer == Optimizer::onebit_adam || options_.optimizer == Optimizer::onebit_lamb;
    const auto rank = static_cast<uint64_t>(world_->rank());
    const auto batches = at::detail::createCPUGenerator(1000 * options_.seed + rank + 1);

    Outcome outcome;
    outcome.snapshots.push_back(all_in_one_row(*model_));
    auto next_snapshot = snapshot_steps.begin();
    for (int64_t step = 1; step <= options_.steps; ++step) {
      const int64_t sent_before = world_->bytes_sent();
      optimizer->zero_grad();
      const auto loss = loss_of(*model_, draw_batch(text_.training, kSequences, length(), batches));
      loss.backward();
      if (!averages) average_gradients(*model_, *world_);
      optimizer->step();
      rate.step();
      outcome.bytes_a_step = world_->bytes_sent() - sent_before;

      const int64_t tenth = std::max<int64_t>(1, options_.steps / 10);
      if (step > options_.steps - tenth) outcome.training += loss.item<double>() / static_cast<double>(tenth);
      if (evaluates_after(step)) outcome.held_out += held_out_loss() / kEvaluations;
      if (next_snapshot != snapshot_steps.end() && *next_snapshot == step) {
        outcome.snapshots.push_back(all_in_one_row(*model_));
        ++next_snapshot;
      }
    }
    outcome.parameters = outcome.snapshots.front().numel();
    outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return outcome;
  }

 private:
  int64_t length() const { return length_of(text_unit(options_.model)); }

  // Only the first rank evaluates: all have the same parameters.
  bool evaluates_after(int64_t step) const {
    const int64_t interval = std::max<int64_t>(1, options_.steps / (6 * kEvaluations));
    const int64_t left = options_.steps - step;
    return world_->rank() == 0 && left % interval == 0 && left / interval < kEvaluations;
  }

  double held_out_loss() {
    const at::NoGradGuard no_grad;
    return loss_of(*model_, spread_batch(text_.held_out, kHeldOutSequences, length())).item<double>();
  }

  const Options& options_;
  const Text& text_;
  std::shared_ptr<LanguageModel> model_;
  World world_;
};

}  // namespace

Outcome train(const Options& options, const Text& text, const std::vector<int64_t>& snapshot_steps) {
  const auto worlds = pacer::Communicator::in_process(options.ranks);
  std::vector<Trainer> trainers;
  for (const World& world : worlds) {
    torch::manual_seed(options.seed);  // the same initial values everywhere
    trainers.emplace_back(options, text, make_model(options.model, text.vocabulary), world);
  }
  std::vector<Outcome> outcomes(worlds.size());
  std::vector<std::exception_ptr> errors(worlds.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < worlds.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        outcomes[rank] = trainers[rank].run(snapshot_steps);
      } catch (const std::exception& error) {
        errors[rank] = std::current_exception();
        worlds[rank]->leave(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  Outcome outcome = outcomes.front();
  outcome.training = 0;
  for (const Outcome& own : outcomes) outcome.training += own.training / static_cast<double>(worlds.size());
  return outcome;
}

}  // namespace scales
