// The contract between optimizers and a training session: what a Session may ask of an optimizer beyond
// torch::optim::Optimizer. It lets gradients stay as backward left them (a sum over micro-batches, loss
// scaled, unclipped), because averaging, unscaling and clipping are one factor inside the optimizer's kernel.
//
// Every optimizer of pacer is one. Other optimizers work in a Session, too: they get finished gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/collectives/gradient_scope.h>
#include <pacer/collectives/parameter_range.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {

class Communicator;

// Addresses of the parameters' TensorImpl.
using ReleasedParameters = std::unordered_set<const void*>;

// Inputs of one step.
struct StepInputs {
  // Times this, the stored gradients are their mean: 1 / (sum of the weights of the micro-batches).
  double average = 1;
  // The same for gradients of this rank alone (GradientScope::rank): times average times this, they are this
  // rank's mean.
  double local_weight = 1;
  // Looks at the gradients first; null: no norm, no clipping, gradients are those of the loss itself.
  std::shared_ptr<GradientGuard> guard;
  // False while a curriculum, a learning-rate warm-up or another number that a freeze depends on still moves.
  bool freeze_allowed = true;
  // The device alone counts applied steps, so that enqueue() can be replayed.
  bool replayable = false;
};

// What is known of a run before its first step.
struct RunPlan {
  // Names what still moves in the step that comes after so many: a curriculum, a learning-rate warm-up; empty
  // for nothing.
  std::function<std::string(int64_t step)> unsettled;
  std::optional<int64_t> end;  // steps after which the learning rate stays 0, where that is known
  // The guard must have seen all gradients of a step before any is used: they are clipped by their norm, or
  // the loss is scaled.
  bool looks_first = false;
};

class SessionOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;

  // A step in three parts, for who replays the middle one from a CUDA graph; step() is their sequence.
  // prepare: everything the host does: checks, new state, changed tables sent to the device. Throws before
  // anything is changed.
  virtual void prepare(const StepInputs& inputs) = 0;
  // enqueue: kernels only. False where the host knows that nothing was changed (non-finite gradients, CPU).
  virtual bool enqueue() = 0;
  // conclude: the host's book-keeping; `applied` is what enqueue returned.
  virtual void conclude(bool applied) = 0;
  // Part of the coming step's look at gradients, ahead of prepare and while others are still on their way:
  // the gradients of these parameters are there, by way of the current stream, and stay as they are; whoever
  // changes one nevertheless, by an operation that counts versions, makes the step look again. The current
  // stream of prepare and enqueue comes after this one. False where nothing was done.
  virtual bool look_early(const std::vector<torch::Tensor>& /*parameters*/) { return false; }
  // A backward begins after which the next step comes, or none, should it fail: an optimizer may start what
  // it can do ahead. Gradients are not there yet. A step that was prepared before and not enqueued never will
  // be.
  virtual void expect_step() {}
  // The last backward before a step begins, and gradients are not there yet: an optimizer may take up the
  // step while they come. `inputs` returns what prepare() will get, or nothing if no step will come. Calling
  // `inputs` waits for the other ranks; it may be called until prepare(), on any thread.
  using ComingInputs = std::function<std::optional<StepInputs>()>;
  virtual void begin_backward(const ComingInputs& /*inputs*/) {}
  // The step of a GradientRelease, which updates parameters one by one while backward runs, in place of prepare,
  // enqueue and conclude. Returns why there is none, the end of a sentence; empty where there is one.
  virtual std::string unreleased_reason() const { return "its step takes all gradients at once"; }
  // Such a step begins, and no gradient is there yet. `inputs` have no guard. Throws before anything is changed.
  virtual void begin_release(const StepInputs& inputs);
  // The parameter's gradient is whole, by way of the current stream. It is used once and cleared, and parameters to
  // which that has happened are added to `released`. The first gradient of a parameter without state may wait for
  // others, which together have a sixteenth of all elements.
  virtual void release(const torch::Tensor& parameter, ReleasedParameters& released);
  // No more gradients come. The step counts for the parameters that were updated, those that still wait among them
  // unless the backward pass `has_failed`, and for no other.
  virtual void end_release(bool has_failed, ReleasedParameters& released);
  // Another number when a captured enqueue() no longer does what a new one would.
  virtual int64_t enqueue_version() const = 0;

  // Parameters whose gradients need not come added over all ranks, because the optimizer makes ranks agree on
  // something else; and over which ranks they are added for the coming step.
  virtual std::vector<torch::Tensor> local_parameters() const { return {}; }
  virtual GradientScope gradient_scope() const { return GradientScope::world; }

  // Before the first step of a Session whose ranks `world` joins. Throws InvalidArgument where the plan
  // cannot work.
  virtual void check_run(const Communicator& /*world*/, const RunPlan& /*plan*/) const {}

  // Why ranks cannot share this optimizer's work, all of them (world) or those of each node, the end of a
  // sentence; empty where they can.
  virtual std::string unshared_reason(GradientScope /*among*/) const { return "it updates whole parameters"; }
  // Bounds of parts must be at multiples of so many elements of each parameter.
  virtual int64_t smallest_piece() const { return 1; }
  // From now on it updates these ranges only, and has state for them only, cut from the state that it has;
  // its parameters that are not among them stay whole, and those that are not its own are passed over. `ranks`
  // update the other ranges. Later calls may change where values and gradients are, not the ranges.
  virtual void update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks);
  virtual bool is_shared_out() const { return false; }
  // Whether what export_state calls by this name, of a parameter that was shared out, are this rank's
  // elements of it.
  virtual bool is_part(const std::string& /*name*/, const torch::Tensor& /*tensor*/) const { return false; }
  // How many of the parameter's elements each element of such a part is about: one, or more, which share a scale.
  virtual int64_t elements_each(const std::string& /*name*/) const { return 1; }

  // Around what a Session evaluates, and around the file of its best model; one may lie inside another. An
  // optimizer whose model holds other weights in training puts those of evaluation in place, and at the end
  // the bits that were there. Throws where it cannot, changing nothing.
  virtual void evaluation_begin() {}
  virtual void evaluation_end() noexcept {}
  // Whether those of evaluation are an average of weights, so that there need not be another one.
  virtual bool averages_weights() const { return false; }

  // The rate that a schedule multiplies: the group's initial_lr, which is first set to its lr where it is
  // unset.
  virtual double base_lr(size_t group) = 0;
  virtual void set_base_lr(size_t group, double rate) = 0;
  // One schedule at a time: whoever sets the learning rate holds the claim as long as it does. Throws
  // InvalidArgument where another one, called by its name, is held.
  using LearningRateClaim = std::shared_ptr<const std::string>;
  LearningRateClaim claim_learning_rate(const std::string& name);

  // Steps that changed nothing because a gradient was not finite. Waits for the device on a GPU.
  virtual int64_t skipped_steps() const = 0;

  // The name the parameter was given, else "group.index", else "unknown".
  virtual std::string parameter_name(const torch::Tensor& parameter) const = 0;
  // Names the parameters that have none yet.
  virtual void name_parameters(const NamedParameters& names) = 0;

  // All state and options by parameter name, not copied: tensors share the optimizer's memory. After
  // update_only they are vectors of the ranges' elements; an import takes whole ones and cuts them.
  virtual NamedTensors export_state() const = 0;
  // Whether tensors of the state are on the CPU, wherever parameters are, and may be loaded from there.
  virtual bool keeps_state_on_host() const { return false; }
  // What differs from rank to rank beside it; most optimizers have none.
  virtual NamedTensors export_rank_state() const { return {}; }
  // Whether this rank can go on from its own, left beside `state`: each rank and each node has now what it
  // had then.
  virtual bool fits_rank_state(const NamedTensors& /*state*/, const NamedTensors& /*rank_state*/) const {
    return true;
  }
  // What this rank is to go on from where it cannot, or where there were more or fewer ranks, from what each
  // rank has left. Throws InvalidArgument where that does not fit.
  virtual NamedTensors join_rank_states(const NamedTensors& state,
                                        const std::vector<NamedTensors>& rank_states) const;

  // Continues from exported state. Names decide, not positions. Throws InvalidArgument that names the
  // parameter where anything is missing, left over or does not fit; then nothing was changed.
  void import_state(const NamedTensors& state) { import_states(state, {}); }
  // The same, with what export_rank_state left.
  void import_states(const NamedTensors& state, const NamedTensors& rank_state) {
    prepare_import(copies_of(state), rank_state)();
  }
  // import_states in two halves, for ranks that load together or not at all. This one checks everything and
  // makes what is to be put in force; it throws as import_states does and changes nothing. Calling what it
  // returned puts that in force, once, before anything else is done to the optimizer; dropping it loads
  // nothing. Tensors of `state` may become the optimizer's own: give copies of what is used elsewhere, too.
  using PreparedImport = std::function<void()>;
  virtual PreparedImport prepare_import(const NamedTensors& state, const NamedTensors& rank_state) = 0;

 protected:
  // For optimizers that have no state of each rank: throws InvalidArgument where there is some to load.
  static void require_no_rank_state(const NamedTensors& rank_state);

 private:
  std::weak_ptr<const std::string> learning_rate_claim_;
};

}  // namespace pacer
