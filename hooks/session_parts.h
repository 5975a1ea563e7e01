// What a Session is made of, as its hooks see it: they keep references and say what they want of it. No hook
// sees the Session itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/collectives/communicator.h>
#include <pacer/hooks/hook.h>
#include <pacer/hooks/progress.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/session_optimizer.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

class Fp8Scaling;
class ShardedState;

// What has come together since the last step: of this rank, and once gradients are ready of all ranks.
struct WindowTotals {
  double weight = 0;          // of the micro-batches
  int64_t tokens = 0;         // trained on
  at::Tensor loss;            // fp32, no dimensions: the weighted sum of losses; only with record_loss
  double gradient_scale = 1;  // what the stored gradients were multiplied with besides
};

// What the Validation hook measured last; the same on all ranks.
struct ValidationResult {
  std::string name;   // in records
  double value = 0;   // the mean over all ranks
  int64_t step = -1;  // steps completed when it was measured; -1: nothing was yet
  bool larger_is_better = false;
};

class SessionParts {
 public:
  // `world` may be null: a single rank.
  SessionParts(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
               std::shared_ptr<Communicator> world = nullptr);
  SessionParts(const SessionParts&) = delete;

  torch::nn::Module& model() const { return model_; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  // The optimizer as one of pacer's; null for any other.
  SessionOptimizer* session_optimizer() const { return session_optimizer_; }
  // The device on which the optimizer's parameters are.
  at::Device device() const { return device_; }

  // The ranks that train together, this one included.
  Communicator& world() const { return *world_; }
  const std::shared_ptr<Communicator>& shared_world() const { return world_; }
  bool is_first_rank() const { return world_->rank() == 0; }
  // The ranks that train the same parameters on data of their own: the whole world, unless stages of the
  // model lie on different ranks.
  Communicator& data_ranks() const { return replicas ? *replicas : *world_; }
  const bool world_was_given;

  // The guard of this Session; the first call creates it, and with it the look at all gradients in each step.
  // The optimizer may use gradients before that look only where all hooks that ask say that it may.
  enum class Look { first, any_time };
  const std::shared_ptr<GradientGuard>& guard(Look look = Look::first);
  bool has_guard() const { return guard_ != nullptr; }
  bool looks_first() const { return looks_first_; }
  // What the guard saw last; waits for a GPU. Only with a guard.
  kernels::GradientCheck read_guard() const { return guard_->read(); }
  // Where the guard writes: one kernels::GradientCheck, as bytes on the device. Only with a guard.
  at::Tensor guard_memory() const { return guard_->memory(); }

  // In the order in which they are called.
  const std::vector<std::shared_ptr<Hook>>& hooks() const { return hooks_; }
  // The first hook of that type, or null.
  template <class H>
  H* find() const {
    for (const auto& hook : hooks_) {
      if (auto* found = dynamic_cast<H*>(hook.get())) return found;
    }
    return nullptr;
  }

  // What a step makes of the window's totals, which are those of all ranks; nothing where these train on
  // nothing. coming_inputs: the same while the window's last backward runs; waits for the other ranks.
  std::optional<StepInputs> step_inputs() const;
  std::optional<StepInputs> coming_inputs() const;

  // Returns how many micro-steps the step takes that comes after this progress.
  int64_t micro_steps_of(const Progress& progress) const {
    return micro_steps_at ? micro_steps_at(progress) : micro_steps;
  }
  // Returns what Hook::unused of all hooks returns, together.
  std::vector<at::Tensor> unused(const Progress& progress) const;

  Progress progress;
  WindowTotals window;
  int64_t micro_batch_examples = 0;  // between begin and backward: of the data set, on this rank
  ValidationResult validation;
  int64_t evaluations = 0;  // under way, one inside the other; 0 in training

  // True: the loop should end after this step, and why; see Session::should_stop. Whoever sets it does so on
  // all ranks in the same step.
  bool should_stop = false;
  std::string stop_reason;

  // ---- what hooks ask for, in attach or arrange ----
  int64_t micro_steps = 1;                 // per optimizer step, at most
  bool weight_by_tokens = false;           // micro-batches count by their tokens, not alike
  bool replay_optimizer = false;           // capture the optimizer's kernels in a CUDA graph
  bool releases_gradients = false;         // parameters are updated while backward runs (GradientRelease)
  bool gradients_are_shared_out = false;   // they leave the parameters for parts that ranks own (Shards)
  bool parameters_are_shared_out = false;  // they have their values for a while only (Shards)
  bool saves_frozen = true;                // checkpoints hold weights that are not trained, too
  bool writes_whole_model = false;         // one rank writes all of the model to a file (SaveBest)
  bool record_loss = false;                // add up the losses of a window for the report
  bool accumulate_in_fp32 = true;          // gradients of 16-bit parameters over micro-batches
  bool counts_examples = false;            // those that were trained on, for a sampler (EpochSampler)
  // A parameter that no backward of a window has reached sits the step out; otherwise it is an error, where
  // the Session was given a Communicator (DataParallel, Shards, Pipeline).
  bool unused_is_zero = false;
  // How many micro-steps the step that comes next takes, where that changes; nothing: always micro_steps.
  std::function<int64_t(const Progress&)> micro_steps_at;
  // The loop takes several micro-steps for each step of the optimizer (GradientAccumulation).
  bool accumulates_gradients = false;
  // A Pipeline sets these three: the ranks that have the same stage, the tensors of the model that other
  // ranks have, and those that other ranks update, tied ones among them, by TensorImpl.
  std::shared_ptr<Communicator> replicas;
  std::unordered_set<const void*> tensors_on_other_ranks, updated_on_other_ranks;
  // The hook whose ranks have parts of one state; null where none does (Shards).
  ShardedState* sharded_state = nullptr;
  // Parameters whose gradients the last backward has used up (GradientRelease).
  ReleasedParameters released;
  // What 8-bit layers record while passes run; null where there are none (Precision).
  std::shared_ptr<Fp8Scaling> fp8_scaling;
  // Loads the newest checkpoint, or the one of a step, and returns its step; nothing where there is none.
  // Empty where no hook loads any (Checkpoints).
  std::function<std::optional<int64_t>(std::optional<int64_t> step)> load_checkpoint;
  // The steps that it could load, newest first; on all ranks alike.
  std::function<std::vector<int64_t>()> saved_steps;
  // Whether this rank asks all to stop after the step it is in; nothing where no hook ever asks.
  std::function<bool()> asks_to_stop;
  // What a failed load could not put back, because memory was short: see put_session_back in
  // checkpoints/detail/training_state.h. Null: nothing.
  std::shared_ptr<const NamedTensors> to_put_back;
  // Makes the window's totals those of all ranks while its last backward runs; waits for them. Left by
  // whoever joins the ranks, when training starts; nothing where nobody does.
  std::function<void()> learn_totals;

 private:
  friend class Session;

  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  SessionOptimizer* session_optimizer_;
  at::Device device_;
  std::shared_ptr<Communicator> world_;
  std::shared_ptr<GradientGuard> guard_;
  bool looks_first_ = false;
  std::vector<std::shared_ptr<Hook>> hooks_;
};

}  // namespace pacer
