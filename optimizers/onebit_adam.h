// OneBitAdam: Adam whose ranks exchange the signs of their momentum, one bit an element instead of 32 (Tang
// et al., "1-bit Adam", arXiv:2102.02888). For ranks joined by networks that are slow beside their GPUs or
// CPUs.
//
//   auto world = pacer::Communicator::from_environment();
//   pacer::OneBitAdam optimizer(model->named_parameters(),
//                               pacer::OneBitAdamOptions(1e-3).freeze_step(2'000), world);
//   pacer::Session session(*model, optimizer, world);
//
// Two phases. Warm-up: gradients are averaged over ranks in full precision and the step is AdamW's, to the
// bit that of FusedAdamW. Then the variance freezes, and from there on each rank adds its own gradient to the
// shared momentum and the ranks agree on the new momentum in signs and scales; what rounding to signs loses
// is added to the next step's (collectives/compressed_all_reduce.h). Replicas stay identical to the bit in
// both.
//
// Without a Session, step() averages over ranks what has to be averaged, after backward. Gradients that are
// not finite on any rank change nothing on all of them. Once the variance is frozen, a parameter without
// gradient counts as one whose gradient is zero, and clipping uses one factor for all ranks: max_norm / N
// with N^2 = mean over ranks of |own gradient|^2 / W for what is compressed, plus |mean gradient|^2 for what
// is not.
//
// Parameters: as for FusedAdamW, but without gaps between elements, and not fp64 where they are compressed;
// on the CPU, or on a GPU, where a step is enqueued and nothing waits: gradients that are not finite change
// nothing there, too. What goes wrong in the middle of an exchange is an Error of a later step. At the
// freeze, and with freeze_automatically in each step in which it might come, the host waits for the GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/onebit_adam_options.h>

namespace pacer {

class Communicator;
class FreezeRule;
class GradientBucketer;

namespace detail {
class OneBitAdamEngine;
struct AdamEntry;
struct OneBitPlan;
}  // namespace detail

enum class OneBitPhase { warm_up, compressed };

class OneBitAdam : public FusedOptimizer {
 public:
  // `world` joins the ranks that train together; null: a single rank. The same parameters and options on all.
  // Throws InvalidArgument for what cannot be compressed and for options that contradict each other.
  explicit OneBitAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      OneBitAdamOptions defaults, std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitAdam(std::vector<torch::Tensor> parameters, OneBitAdamOptions defaults,
                      std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitAdam(const NamedParameters& parameters, OneBitAdamOptions defaults,
                      std::shared_ptr<Communicator> world = nullptr);
  explicit OneBitAdam(const std::vector<NamedParamGroup>& groups, OneBitAdamOptions defaults,
                      std::shared_ptr<Communicator> world = nullptr);
  ~OneBitAdam() override;

  // Refused once the variance is frozen.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  void add_param_group(const NamedParamGroup& group);

  OneBitPhase phase() const;
  // After how many steps (attempts, skipped ones included) the variance froze; none before.
  std::optional<int64_t> frozen_at() const { return frozen_at_; }
  // Steps taken or skipped so far.
  int64_t attempts() const { return attempts_; }
  // From this rank to others, for compressed momentum. What each phase sends in all is in the Communicator's
  // traffic(): "warm-up", "compressed", "refresh" for steps that refresh the variance, "frozen" where the
  // frozen variance is used without compression.
  int64_t bytes_sent() const;
  // |what rounding to signs lost| / |what was rounded| of this rank in the last compressed step; 0 before.
  double compression_error() const;

  int64_t skipped_steps() const override;
  void prepare(const StepInputs& inputs) override;
  bool enqueue() override;
  void conclude(bool applied) override;
  bool look_early(const std::vector<torch::Tensor>&) override { return false; }  // norms of local gradients
  std::vector<torch::Tensor> local_parameters() const override;
  bool wants_local_gradients() const override;
  void check_run(const Communicator& world, const Unsettled& unsettled) const override;

  // Each new worker error is the mean of the former ones, server errors are joined and cut anew; where
  // nothing is compressed any more, all of them are added to the momentum in the next step.
  NamedTensors join_rank_states(const std::vector<NamedTensors>& rank_states) const override;

  // Beside AdamW's, how far the freeze is. Momentum is written whole, whatever its form. Both throw Error
  // after a step that failed half-way: load a checkpoint then.
  NamedTensors export_state() const override;
  // This rank's two errors.
  NamedTensors export_rank_state() const override;
  void import_state(const NamedTensors& state) override;
  void import_states(const NamedTensors& state, const NamedTensors& rank_state) override;

  // Archives of one file cannot hold what each rank has of its own: both throw InvalidArgument. Use the
  // Session's Checkpoints, or export_state and export_rank_state.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  enum class Kind { warm_up, compressed, dense, refresh };
  using Entries = std::vector<detail::AdamEntry>;

  void set_up(std::shared_ptr<Communicator> world);
  template <class Group>
  void add_group(const Group& group);
  Kind kind_of_next_step() const;
  // What is sent from here on counts for the coming step's phase.
  void announce_phase() const;
  bool exchanges(const detail::OneBitPlan& plan) const;
  Entries compressed_entries(
      const ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& states) const;
  std::unique_ptr<detail::OneBitAdamEngine> make_engine(Entries entries,
                                                        const detail::OneBitPlan& plan) const;
  void make_missing_states();
  void look();
  StepInputs plain_step_inputs() override;
  void consider_freeze();
  void freeze();
  void report_freeze() const;

  std::shared_ptr<Communicator> world_;
  std::unique_ptr<detail::OneBitPlan> plan_;
  std::unique_ptr<FreezeRule> rule_;                      // only with freeze_automatically
  std::unique_ptr<detail::OneBitAdamEngine> compressed_;  // null in warm-up
  std::unique_ptr<GradientBucketer> bucketer_;            // of step() without a Session
  std::shared_ptr<GradientGuard> own_guard_, guard_;
  std::vector<torch::optim::OptimizerParamGroup> full_precision_groups_;
  StepInputs inputs_;
  Kind kind_ = Kind::warm_up;
  int64_t attempts_ = 0;
  std::optional<int64_t> frozen_at_;
  bool freeze_is_due_ = false;
  bool has_agreed_ = false;
  bool freeze_was_postponed_ = false;
};

}  // namespace pacer
