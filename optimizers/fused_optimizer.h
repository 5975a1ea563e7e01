// The base of the fused optimizers: torch::optim::Optimizer with one memory-bound kernel for all parameters
// instead of a loop of small operations, and the contract of a Session. Which rule it is, the type of the
// options says; in what the optimizers differ is in detail/optimizer_traits.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/session_optimizer.h>
#include <pacer/optimizers/tensor_names.h>

namespace pacer {

namespace detail {
class OptimizerTraits;
class GroupClips;
class StepEngine;
struct OptimizerView;
struct PendingState;
struct RegisteredParameter;
}  // namespace detail

// What FusedAdam, FusedAdamW, FusedLamb, FusedSgd, FusedRmsprop, OwnRuleOptimizer and the 1-bit optimizers share. Not
// used directly.
class FusedOptimizer : public SessionOptimizer {
 public:
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;
  ~FusedOptimizer() override;

  // Updates every parameter that has a gradient. The closure, if given, is called first, with gradients
  // enabled, and its loss is returned.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Options of the group may be this optimizer's or the torch optimizer's, which keeps the defaults in what
  // torch's options lack; without options it takes the defaults. FusedAdam, FusedAdamW, FusedSgd and
  // FusedRmsprop take from the defaults, too, what the options leave as their constructor made it, where torch's
  // optimizers do so: from LibTorch 2.12 on. Names must differ from those of all other parameters. Call this
  // function and not that of torch::optim::Optimizer, which is not virtual and drops the options from LibTorch
  // 2.12 on.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  void add_param_group(const NamedParamGroup& group);

  // Parameters that grow and shrink. Each `second` takes the place of its `first` in the group, with its name and state:
  // row i has the state of the old row rows[i], or where that is -1 begins anew, with zeros, at the parameter's step
  // count. `rows`: Long [rows of the new ones]. The new tensors have the old ones' dtype, device and further dimensions;
  // their values are yours, also of kept rows: a master copy follows them where they changed. All of it or, where it
  // throws InvalidArgument, nothing. It waits for a GPU, and belongs between steps; put the new tensors into the model,
  // too. Not for 1-bit optimizers, nor where ranks share the parameters out (Shards).
  //   optimizer.replace({{means, new_means}, {colors, new_colors}}, rows);
  void replace(const std::vector<std::pair<torch::Tensor, torch::Tensor>>& parameters,
               const torch::Tensor& rows);

  // Parameters that only grow. Each `second` has the rows, [any number, ...] in the parameter's dtype and on its device, that
  // come behind those of its `first`; they begin anew as those of replace do. Returns what takes the parameters' places,
  // in that order, for the model. The old rows stay where they are in memory, those of the state, too, and nothing is
  // allocated, while there is room; where there is none, the new memory has room for as many rows again. Nothing waits
  // for a GPU, except where the device counts the steps (clipping, finite_check, fp16, CUDA graphs), and for moments in 8
  // bits, which are decoded on the host and made anew. Throws as replace does, and for parameters that are not contiguous.
  //   means = optimizer.append_rows({{means, more_means}}).front();
  std::vector<torch::Tensor> append_rows(
      const std::vector<std::pair<torch::Tensor, torch::Tensor>>& parameters);

  // Until the next call, steps change only those rows of these parameters whose number in `visible` is true; the others keep
  // value and state, whatever their gradient is. `visible`: Bool [rows], on the parameters' device. It is held and not
  // copied, so that it may be written to before each step, also one of a CUDA graph. An undefined tensor: all rows again.
  // Norms of gradients are of all rows, and a row that comes back goes on at the parameter's step count. With several
  // ranks, set the same on all. Throws InvalidArgument for other rules than those of FusedAdam, FusedAdamW, FusedSgd,
  // FusedRmsprop and one of your own, for moments in 8 bits, paged state, parts of parameters (Shards), and a parameter
  // that is not contiguous.
  //   optimizer.set_visible_rows({means, colors}, radii > 0);
  void set_visible_rows(const std::vector<torch::Tensor>& parameters, const torch::Tensor& visible);

  // From the next step() on gradients are scaled so that the norm of all of them together is at most max_norm, in the
  // update itself, without waiting for a GPU: what torch::nn::utils::clip_grad_norm_ does before it. Steps whose gradients
  // are not finite change nothing. 0: as it was. Gradients themselves stay as they are. For loops without a Session, where
  // GradientClipping does the same; not for 1-bit optimizers. Throws InvalidArgument for a norm that is negative or not
  // finite. `norm_type`: the norm's order, > 0, infinity for the largest magnitude; other orders than 2 are one more read of
  // the gradients, and throw where their group has a norm of its own.
  void clip_gradient_norm(double max_norm, double norm_type = 2);
  // The same for the gradients of one parameter group by their own norm; other groups stay as they are, or are clipped by
  // theirs, each after a call of its own. It is one more read of that group's gradients. A norm that is not finite makes
  // the step change nothing, as a gradient does. Throws InvalidArgument, too, for a group that is not there, and where
  // clip_gradient_norm clips all groups together.
  void clip_group_gradient_norm(size_t group, double max_norm, double norm_type = 2);
  // The Euclidean norm of all gradients in the last step(), before clipping; 0 before the first one. Waits for a GPU. Throws
  // InvalidArgument where gradients are not clipped.
  double gradient_norm() const;

  // Steps that changed nothing because a gradient was not finite (finite_check, or the guard of a Session).
  // Waits for the device on a GPU.
  int64_t skipped_steps() const override;

  // The archive layout of LibTorch's optimizers, with more keys: FusedAdam, FusedAdamW, FusedSgd and FusedRmsprop
  // load files of torch's Adam, AdamW, SGD and RMSprop as they are, and keep their own values of what such a file
  // lacks. A load is checked completely first; one that fails changes nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Waits for paged state. Where the options have paged(), copies of the state between host and GPU run on
  // after a step has returned. After this call the tensors of state() are what the optimizer has; they may be
  // read and changed until the next backward of a Session or the next step. Saving and export_state() call it
  // themselves. Without paging it does nothing.
  void sync_state() const;
  // Returns how many bytes of state stay on the GPU between steps: at most Paging::resident_bytes, less what
  // memory pressure moved out. 0 before the first step, and for optimizers that are not paged.
  int64_t resident_state_bytes() const;

  std::string parameter_name(const torch::Tensor& parameter) const override;
  // After a parameter was replaced by another tensor, in the model and in its group, this names the new one;
  // a Session calls it then, and before it saves. Throws InvalidArgument where two parameters would have one
  // name.
  void name_parameters(const NamedParameters& names) override;
  NamedTensors export_state() const override;

 protected:
  // The contract of a Session, which calls it through SessionOptimizer. After update_only archives, step() and
  // take_over are refused, because they are of whole parameters.
  void prepare(const StepInputs& inputs) override;
  bool enqueue() override;
  void conclude(bool applied) override;
  void expect_step() override;
  bool look_early(const std::vector<torch::Tensor>& parameters) override;
  std::string unreleased_reason() const override;
  void begin_release(const StepInputs& inputs) override;
  void release(const torch::Tensor& parameter, ReleasedParameters& released) override;
  void end_release(bool has_failed, ReleasedParameters& released) override;
  int64_t enqueue_version() const override;
  std::string unshared_reason(GradientScope among) const override;
  int64_t smallest_piece() const override;
  void update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) override;
  bool is_shared_out() const override;
  bool is_part(const std::string& name, const torch::Tensor& tensor) const override;
  int64_t elements_each(const std::string& name) const override;
  double base_lr(size_t group) override;
  void set_base_lr(size_t group, double rate) override;
  bool keeps_state_on_host() const override;
  PreparedImport prepare_import(const NamedTensors& state, const NamedTensors& rank_state) override;

  // What step() tells prepare where no Session does. An optimizer that knows of other ranks adds up here what
  // has to be added over them.
  virtual StepInputs plain_step_inputs() { return {}; }
  // Whether it does.
  virtual bool has_own_ranks() const { return false; }

  // `defaults` are options of the optimizer's own type.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  FusedOptimizer(const std::vector<NamedParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  // The ratio by which the last step scaled the parameter's update (LAMB), 1 before.
  double trust_ratio_of(const torch::Tensor& parameter) const;

  // Throws InvalidArgument where the optimizer was moved from.
  detail::StepEngine& engine() const;
  const detail::OptimizerTraits& traits() const { return *traits_; }
  detail::OptimizerView view() const;

  // Checks state and options that were read, then puts them in force.
  void restore(detail::PendingState pending);
  // The second half: nothing that was planned with the former states holds any more.
  void commit(detail::PendingState& pending);
  const detail::TensorNames& names() const { return names_; }

  // Groups whose options were set by others may still carry torch's; from now on they have this optimizer's
  // own, of equal values. Warns of groups whose options the base class has dropped (group_defaults.h).
  void adopt_foreign_options();

 private:
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, detail::TensorNames names,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  void require_whole(const char* what) const;
  // The parameters that stand first in these pairs. Throws InvalidArgument where the function cannot change them.
  std::vector<detail::RegisteredParameter> parameters_to_change(
      const char* function, const std::vector<std::pair<torch::Tensor, torch::Tensor>>& pairs);
  // The state of what takes the place of the parameter with that number, made from that parameter's.
  using StateOfRows = std::function<std::unique_ptr<torch::optim::OptimizerParamState>(
      size_t number, const torch::optim::OptimizerParamState& state)>;
  void put_in_place(const std::vector<detail::RegisteredParameter>& before,
                    const std::vector<torch::Tensor>& after, const StateOfRows& state_of_rows);
  // For clip_gradient_norm.
  StepInputs clipped_step_inputs();
  void set_clipping(GradientGuard& guard) const;
  bool is_clipping() const { return max_norm_ != 0 || group_clips_ != nullptr; }

  // Returns nothing where the tensor is not one of the parameters.
  std::optional<std::string> find_name(const torch::Tensor& parameter) const;

  const detail::OptimizerTraits* traits_;
  size_t known_groups_;  // those from there on were added through the base class
  detail::TensorNames names_;
  std::unique_ptr<detail::StepEngine> engine_;
  double max_norm_ = 0;  // of clip_gradient_norm; 0: none, or another norm than the Euclidean one
  std::shared_ptr<detail::GroupClips> group_clips_;  // null: none
  std::shared_ptr<GradientGuard> clipping_;          // once a step has clipped
};

// The constructors of the optimizer whose options these are. Parameters come as they are or in groups, with
// or without names.
template <class Options>
class FusedOptimizerOf : public FusedOptimizer {
 public:
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                            Options defaults = {})
      : FusedOptimizer(groups, std::make_unique<Options>(std::move(defaults))) {}
  explicit FusedOptimizerOf(const std::vector<NamedParamGroup>& groups, Options defaults = {})
      : FusedOptimizer(groups, std::make_unique<Options>(std::move(defaults))) {}
  explicit FusedOptimizerOf(std::vector<torch::Tensor> parameters, Options defaults = {})
      : FusedOptimizerOf({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
  explicit FusedOptimizerOf(const NamedParameters& parameters, Options defaults = {})
      : FusedOptimizerOf(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
};

}  // namespace pacer
