// The training loop's companion: a model, an optimizer and hooks around a loop that stays the user's.
//
//   pacer::Session session(*model, optimizer);
//   session.use(pacer::GradientAccumulation(4)).use(pacer::GradientClipping(1.0));
//   for (auto& batch : *loader) {
//     auto [x, y] = session.begin(batch.data, batch.target);
//     session.backward(criterion(model->forward(x), y));
//     session.step();
//   }
//   session.finish();
//
// hooks/hook.h shows what happens in each call. Any torch::optim::Optimizer works: it gets averaged,
// unscaled, clipped gradients in place. One of pacer's gets them as they are and does all of that in its own
// kernel, and then a step never waits for the GPU.
//
// Without hooks a Session changes nothing: the same gradients, the same optimizer step, cleared gradients.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/pimpl.h>

#include <pacer/hooks/batch.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>

namespace pacer {

class LearningRateSchedule;

namespace detail {
class EvaluationScope;
class GradientWatch;
class JointResume;
class ParameterWatch;
class WindowOfSession;
class SkippedStepsWatch;
class StepRunner;
class ZeroedGradients;
}  // namespace detail

// Whose learning rates a resumed run has, where the checkpoint's differ from the program's.
enum class ResumedRates {
  checkpoint,  // those that were saved; a warning names the difference
  program,     // those that the optimizer was made with
};

struct ResumeOptions {
  ResumeOptions() = default;
  TORCH_ARG(ResumedRates, learning_rates) = ResumedRates::checkpoint;
  // The step to go on from, one of Session::saved_steps(); none: that of the newest checkpoint. Newer
  // checkpoints stay where they are until this run saves their steps.
  TORCH_ARG(std::optional<int64_t>, step) = std::nullopt;
};

struct BackwardOptions {
  BackwardOptions() = default;
  // Keeps the graph for another backward: of a second loss on the same forward pass, in this window or in
  // another Session. Before this one's optimizer steps, because the graph needs the weights as they were.
  TORCH_ARG(bool, retain_graph) = false;
};

class Session {
 public:
  // Both are held by reference and must outlive the Session, which keeps a model in a shared_ptr or holder
  // alive. Throws InvalidArgument for an optimizer without parameters (a rank of a Pipeline may have none).
  // Parameters that the optimizer has no name for get those of the model. With a `world` of several ranks
  // every rank trains the same model on its own data; see parallel/data_parallel.h.
  Session(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
          std::shared_ptr<Communicator> world = nullptr);
  // The same for a module in its holder, as TORCH_MODULE makes them.
  template <class Holder, std::enable_if_t<torch::detail::is_module_holder<Holder>::value, int> = 0>
  Session(const Holder& model, torch::optim::Optimizer& optimizer,
          std::shared_ptr<Communicator> world = nullptr)
      : Session(*model.ptr(), optimizer, std::move(world)) {}
  // And for one in a shared_ptr. Throws InvalidArgument where it is empty.
  template <class Module, std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>, int> = 0>
  Session(const std::shared_ptr<Module>& model, torch::optim::Optimizer& optimizer,
          std::shared_ptr<Communicator> world = nullptr)
      : Session(existing(model.get()), optimizer, std::move(world)) {}
  Session(const Session&) = delete;
  // Warns where finish() was forgotten: gradients of an incomplete window are lost, and so are the last
  // checkpoint and metrics. Before finish() it also tells the other ranks that this one goes no further.
  ~Session();

  // Adds a hook: a temporary, std::move(hook), or a std::shared_ptr that you keep. The order does not matter.
  // Throws InvalidArgument where it contradicts one that is there, and after begin or resume.
  Session& use(std::shared_ptr<Hook> hook);
  template <class H, std::enable_if_t<std::is_base_of_v<Hook, std::decay_t<H>>, int> = 0>
  Session& use(H&& hook) {
    static_assert(
        !std::is_lvalue_reference_v<H>,
        "a Session owns its hooks: pass a temporary, std::move(hook), or a std::shared_ptr you keep");
    return use(std::shared_ptr<Hook>(std::make_shared<H>(std::forward<H>(hook))));
  }
  // The same for the hook of a handle: of a LayerDrop, an EpochSampler, a Pipeline, or what else has a
  // hook().
  template <class Handle,
            std::enable_if_t<
                std::is_convertible_v<decltype(std::declval<const Handle&>().hook()), std::shared_ptr<Hook>>,
                int> = 0>
  Session& use(const Handle& handle) {
    return use(std::shared_ptr<Hook>(handle.hook()));
  }
  template <class T, std::enable_if_t<std::is_same_v<std::decay_t<T>, LearningRateSchedule>, int> = 0>
  Session& use(T&& /*schedule*/) {
    static_assert(!std::is_same_v<std::decay_t<T>, LearningRateSchedule>,
                  "a schedule is no hook: write use(pacer::LearningRate(schedule))");
    return *this;
  }

  // Continues from the newest complete checkpoint of the Checkpoints hook, if there is one, and says so on
  // stderr, with what it passed over. Returns the step it continues from. Throws, changing nothing, where
  // that checkpoint does not fit this model, optimizer or these hooks.
  std::optional<int64_t> resume(const ResumeOptions& options = {});
  // The steps that it could continue from, newest first. It reads every checkpoint and compares its checksums;
  // of those whose parameters are finite it names these alone. On all ranks together, before the first begin.
  std::vector<int64_t> saved_steps();

  // A micro-step begins: hooks cut the batch, its tensors go to the parameters' device without waiting, gates
  // are drawn, autocast starts. Counts as tokens: batch x sequence where the first tensor holds integers in
  // at least two dimensions (token ids), else the size of its first dimension. A begin without a backward is
  // forgotten by the next one.
  template <class... Tensors>
  Batch<sizeof...(Tensors)> begin(const Tensors&... tensors) {
    static_assert((std::is_convertible_v<const Tensors&, at::Tensor> && ...), "a batch is made of tensors");
    static_assert(sizeof...(Tensors) > 0, "a batch has at least one tensor");
    std::vector<at::Tensor> ready = begin_micro_step({tensors...});
    std::array<at::Tensor, sizeof...(Tensors)> array;
    std::move(ready.begin(), ready.end(), array.begin());
    return {std::move(array), forward_scope_};
  }

  // Between begin and backward: how many tokens this micro-batch really trains on (padding left out). A
  // window in which no rank trains on any changes nothing. A micro-batch without any, or without rows, counts
  // for nothing in the mean of its window, whatever its loss is: a mean over nothing is 0 / 0.
  void count_tokens(int64_t tokens);
  // Between begin and backward: how many examples of the data set this micro-batch holds. Without it that is
  // the size of the first dimension of the first tensor. An EpochSampler needs it for batches that are
  // sequence-first or packed.
  void count_examples(int64_t examples);

  // Ends the forward pass and runs backward on loss x loss scale x weight of the micro-batch. `loss`: one
  // floating-point number, the mean over the micro-batch. Where backward throws, the window's gradients are
  // dropped and it starts again with the next begin. With GradientRelease it takes the optimizer's step, and where it
  // throws some parameters may have taken theirs, which the error says.
  void backward(const at::Tensor& loss, const BackwardOptions& options = {});

  // Ends the micro-step; on the last one of a window the optimizer takes its step. True if it did (even where
  // it then skipped because of gradients that are not finite).
  bool step();

  // Ends training: an incomplete window takes its step with the mean of what it has; last metrics and
  // checkpoint. A second call does nothing.
  void finish();

  // Runs forward and backward, with all layers and under autocast, on what `loss` builds (a batch of the full
  // length), so that memory is reserved once, before a curriculum or layer dropping makes steps smaller. It
  // does so twice, the second time beside the state that one of pacer's optimizers makes. Gradients, buffers
  // and random state are put back. Between steps only, and not with GradientRelease, because all gradients
  // exist in such a pass.
  void prewarm(const std::function<at::Tensor()>& loss);

  // Calls f in evaluation mode: no gradients, Module::eval(), autocast as in training; all put back after it.
  template <class F>
  auto evaluate(F&& f) {
    const auto scope = begin_evaluation();
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      std::forward<F>(f)();
      end_evaluation(*scope);
    } else {
      auto result = std::forward<F>(f)();
      end_evaluation(*scope);
      return result;
    }
  }

  // While what it returns exists, every parameter has its values, where Shards keeps parts of them: to look
  // at the model, to save it, or to change it, on all ranks alike. Between steps, on all ranks together; each
  // needs the memory of the whole model. Without such Shards it does nothing.
  //   { const auto whole = session.whole_parameters();  torch::save(model, "model.pt"); }
  [[nodiscard]] WholeParameters whole_parameters() const;

  // True once the end of training was asked for, by a hook (EarlyStopping) or a signal to any rank
  // (CheckpointsOptions::stop_on_signal), on all ranks after the same step: leave the loop and call finish().
  // Steps may still be taken. The reason is a short text, empty before.
  bool should_stop() const { return parts_.should_stop; }
  const std::string& stop_reason() const { return parts_.stop_reason; }

  // Writes the line to stdout, on rank 0 alone; the other ranks print nothing. Where the Metrics hook draws a
  // progress bar, the line comes above it. A line end is added.
  void print(const std::string& line);

  // Gives the Metrics hook a number of the loop's own, such as an accuracy or the loss of a discriminator; at
  // any time, as often as there are values. The next record has, under that name, the mean of those that came
  // since the record before, each counting alike. `value`: one real number, as a tensor on any device, whose
  // graph is not kept and for which nothing waits. With several ranks rank 0's values are recorded, and the
  // other ranks may call it or not. Throws InvalidArgument, recording nothing, without the Metrics hook, for
  // any other tensor, and for a name that records have already.
  void record(const std::string& name, const at::Tensor& value);
  void record(const std::string& name, double value);

  // The hooks, in the order in which they are called.
  const std::vector<std::shared_ptr<Hook>>& hooks() const { return parts_.hooks(); }
  // How far training is: `step` counts the attempts completed, `tokens` those trained on so far.
  const Progress& progress() const { return parts_.progress; }
  // The norm of the last step's gradient, unscaled, averaged and before clipping. It needs a hook that looks
  // at the gradient (GradientClipping, Precision), and waits for a GPU.
  double gradient_norm() const;
  // How many steps were skipped because gradients were not finite. It waits for a GPU.
  int64_t skipped_steps() const;

 private:
  friend class detail::JointResume;
  friend class detail::WindowOfSession;

  static torch::nn::Module& existing(torch::nn::Module* model);
  std::vector<at::Tensor> begin_micro_step(std::vector<at::Tensor> tensors);
  void require_between_micro_steps();
  MicroBatch prepare(std::vector<at::Tensor> tensors);
  double weight_of(int64_t tokens) const;
  at::Tensor scaled_loss(const at::Tensor& loss, double weight);
  void begin_passes(const Progress& progress);
  void end_passes();
  [[noreturn]] void fail_backward(const std::exception& error);
  std::shared_ptr<detail::EvaluationScope> begin_evaluation();
  static void end_evaluation(detail::EvaluationScope& scope);
  std::vector<double> base_rates() const;
  void set_base_rates(const std::vector<double>& rates);
  void settle_rates(const std::vector<double>& of_program, ResumedRates whose);
  void add(std::shared_ptr<Hook> hook);
  void start();
  bool is_before_begin() const;
  void arrange();
  void start_training();
  void begin_training();
  std::string unsettled(int64_t step) const;
  void take_step();
  void make_gradients_ready(const Progress& window);
  void tell_gradients_ready(const Progress& window);
  void update(const Progress& window);
  void prewarm_passes(const std::function<at::Tensor()>& loss);
  void prewarm_pass(const std::function<at::Tensor()>& loss);
  void skip_empty_window();
  void check_unused(const std::vector<at::Tensor>& joined = {}) const;
  void fill_unused_gradients(const Progress& window);
  void drop_window();
  void leave_peers(const std::string& reason) noexcept;

  SessionParts parts_;
  std::shared_ptr<detail::ForwardScope> forward_scope_;
  std::unique_ptr<detail::StepRunner> runner_;
  std::unique_ptr<detail::GradientWatch> gradients_;
  std::unique_ptr<detail::ParameterWatch> trained_;
  std::unique_ptr<detail::SkippedStepsWatch> skipped_;
  std::unique_ptr<detail::ZeroedGradients> zeroed_;

  bool started_ = false;   // no more hooks
  bool training_ = false;  // the hooks were started
  bool finished_ = false;
  bool in_forward_ = false;   // begin was called, backward was not
  bool in_backward_ = false;  // backward was called, step was not
  size_t hooks_ready_ = 0;    // those whose gradients_ready() of this window's step is done
  OnceOnFirstRank warns_of_empty_window_;
  int64_t micro_batch_tokens_ = 0;
};

}  // namespace pacer
