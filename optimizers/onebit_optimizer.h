// What the 1-bit optimizers share: two phases, what each of them exchanges, the freeze between them, and the
// state of both. Not used directly; see onebit_adam.h and onebit_lamb.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_optimizer.h>

namespace pacer {

class Communicator;

namespace detail {
class CompressedParameters;
class FreezeRule;
class HostCopy;
class OneBitOverlap;
class StepAcrossRanks;
enum class OneBitKind;
struct GroupSettings;
struct OneBitSetup;
}  // namespace detail

// Whether the variance has frozen: steps in full precision before, compressed ones after.
enum class OneBitPhase { warm_up, compressed };

class OneBitOptimizer : public FusedOptimizer {
 public:
  ~OneBitOptimizer() override;

  // Refused once the variance is frozen.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  void add_param_group(const NamedParamGroup& group);

  OneBitPhase phase() const;
  // After how many steps (attempts, skipped ones included) the variance froze; none before.
  std::optional<int64_t> frozen_at() const { return frozen_at_; }
  // Steps taken or skipped so far.
  int64_t attempts() const { return attempts_; }
  // The bytes that this rank sent to others as compressed momentum. The Communicator's traffic() has all that
  // each phase sends: "warm-up", "compressed", "refresh" for steps that refresh the variance, "frozen" where
  // the frozen variance is used without compression.
  int64_t bytes_sent() const;
  // |what rounding to signs lost| / |what was rounded| of this rank in the last compressed step; 0 before.
  double compression_error() const;

  int64_t skipped_steps() const override;
  void name_parameters(const NamedParameters& names) override;

  // Writes the state of FusedOptimizer, and whether and when the variance froze. Momentum is written whole,
  // whatever its form. Both exports throw Error after a step that failed half-way: load a checkpoint then.
  NamedTensors export_state() const override;
  // This rank's two errors.
  NamedTensors export_rank_state() const override;

  // Archives of one file cannot hold what each rank has of its own: both throw InvalidArgument. Use the
  // Session's Checkpoints, or export_state and export_rank_state.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  void begin_backward(const ComingInputs& inputs) override;
  void prepare(const StepInputs& inputs) override;
  bool enqueue() override;
  void conclude(bool applied) override;
  bool look_early(const std::vector<torch::Tensor>&) override { return false; }  // norms of local gradients
  std::vector<torch::Tensor> local_parameters() const override;
  GradientScope gradient_scope() const override;
  void check_run(const Communicator& world, const RunPlan& run) const override;

  // The ranks of a node can share it where nodes are the workers (hierarchical): each then has a part of its
  // node's momentum, variance and errors.
  std::string unshared_reason(GradientScope among) const override;
  void update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) override;
  bool is_part(const std::string& name, const torch::Tensor& tensor) const override;

  // Each new worker error is the mean of the former ones, server errors are joined and cut anew; where
  // nothing is compressed any more, all of them are added to the momentum in the next step.
  bool fits_rank_state(const NamedTensors& state, const NamedTensors& rank_state) const override;
  NamedTensors join_rank_states(const NamedTensors& state,
                                const std::vector<NamedTensors>& rank_states) const override;
  PreparedImport prepare_import(const NamedTensors& state, const NamedTensors& rank_state) override;

  // `defaults` are options of the optimizer's own type; all else is as in OneBitOptimizerOf.
  OneBitOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                  std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                  std::shared_ptr<Communicator> world);
  OneBitOptimizer(const std::vector<NamedParamGroup>& groups,
                  std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                  std::shared_ptr<Communicator> world);

  // Null in warm-up.
  detail::CompressedParameters* compressed() const;

 private:
  // What only the steps before the freeze need.
  struct WarmUp {
    std::unique_ptr<detail::FreezeRule> rule;  // only with freeze_automatically
    bool freeze_is_due = false;
    bool freeze_was_postponed = false;  // a warning has said so
  };
  // What buckets need that travel while backward runs.
  struct Ahead {
    std::shared_ptr<detail::OneBitOverlap> overlap;  // null until the first backward that it takes part in
    ComingInputs coming;                             // in that backward
    std::optional<StepInputs> inputs;                // with which buckets have started
    std::unique_ptr<detail::HostCopy> late_check;    // of the last step, if it had begun in backward
  };
  // What step() without a Session needs.
  struct Alone {
    std::unique_ptr<detail::StepAcrossRanks> across_ranks;
    std::shared_ptr<GradientGuard> guard;
  };

  // ---- onebit_optimizer.cpp ----
  const char* name() const;
  void set_up(std::shared_ptr<Communicator> world);
  c10::Device device() const;
  void check_device() const;
  std::vector<detail::GroupSettings> settings() const;
  detail::OneBitSetup setup_for(const std::vector<detail::GroupSettings>& settings) const;
  void read_settings();
  template <class Group>
  void add_group(const Group& group);
  std::vector<torch::Tensor> local_parameters(const detail::OneBitSetup& onebit,
                                              const std::vector<detail::GroupSettings>& settings) const;

  // ---- onebit_optimizer_step.cpp ----
  detail::OneBitKind kind_of_next_step() const;
  // What is sent from here on counts for the coming step's phase.
  void announce_phase() const;
  void begin(detail::OneBitKind kind, const detail::OneBitSetup& onebit, const StepInputs& inputs);
  // Runs what cannot be undone. Where it throws, every later step and export does, until a state is loaded.
  void mark_failed_if_throws(const std::function<void()>& f);
  void require_intact() const;
  StepInputs plain_step_inputs() override;
  bool has_own_ranks() const override { return true; }
  bool start(size_t turn);
  bool has_started() const;
  void require_as_started(const StepInputs& inputs);
  void require_applied(bool applied) const;
  void require_finite() const;
  // Throws unless the optimizer is intact, all gradients were finite and none of its momentum is on its way.
  void require_nothing_in_flight() const;

  // ---- onebit_optimizer_freeze.cpp ----
  void consider_freeze();
  void postpone_freeze(const char* may, const char* why);
  void freeze();
  void report_freeze();

  // ---- onebit_optimizer_state.cpp ----
  NamedTensors completed(const NamedTensors& saved) const;
  // Ranks that share out their work have added gradients up by these parameters, and cannot change that.
  void require_same_local(const std::vector<torch::Tensor>& parameters) const;

  std::shared_ptr<Communicator> world_;
  std::shared_ptr<Communicator> shard_ranks_;  // of this rank's node, where they have parts; else null
  std::unique_ptr<detail::OneBitSetup> onebit_;
  WarmUp warm_up_;
  Ahead ahead_;
  Alone alone_;
  StepInputs inputs_;          // of the last step
  detail::OneBitKind kind_{};  // of the last step; warm-up first
  int64_t attempts_ = 0;
  std::optional<int64_t> frozen_at_;
  std::string failure_;  // of a step that failed half-way; empty where none did
};

// The constructors of the optimizer whose options these are. Parameters come as they are or in groups, with
// or without names, the same with the same options on all ranks. `world` joins the ranks that train together;
// null: a single rank, refused in a process that is one of several. Throws InvalidArgument for what cannot be
// compressed and for options that contradict each other.
template <class Options>
class OneBitOptimizerOf : public OneBitOptimizer {
 public:
  explicit OneBitOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                             std::shared_ptr<Communicator> world = nullptr)
      : OneBitOptimizer(groups, std::make_unique<Options>(std::move(defaults)), std::move(world)) {}
  explicit OneBitOptimizerOf(const std::vector<NamedParamGroup>& groups, Options defaults,
                             std::shared_ptr<Communicator> world = nullptr)
      : OneBitOptimizer(groups, std::make_unique<Options>(std::move(defaults)), std::move(world)) {}
  explicit OneBitOptimizerOf(std::vector<torch::Tensor> parameters, Options defaults,
                             std::shared_ptr<Communicator> world = nullptr)
      : OneBitOptimizerOf({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults),
                          std::move(world)) {}
  explicit OneBitOptimizerOf(const NamedParameters& parameters, Options defaults,
                             std::shared_ptr<Communicator> world = nullptr)
      : OneBitOptimizerOf(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults),
                          std::move(world)) {}
};

}  // namespace pacer
