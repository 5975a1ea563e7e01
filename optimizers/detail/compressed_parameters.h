// The compressed entries of a 1-bit optimizer once the variance is frozen, in buckets that are exchanged each
// by itself. The StepEngine calls them in each step, as it calls its tables; the OneBitOptimizer says before
// which kind of step comes.
//
// Ranks agree on the places of elements in the buckets. So dtype, shape and memory order of a compressed
// parameter are fixed from the freeze on; its address is not.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/detail/onebit_bucket.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

class CompressedParameters {
 public:
  // There is at least one bucket; their tensors follow one another in the order of the parameters. All have
  // an exchange or none. `shard_ranks` as theirs.
  CompressedParameters(std::vector<std::unique_ptr<OneBitBucket>> buckets, at::Device device,
                       std::shared_ptr<Communicator> shard_ranks);

  // From the states of the tensors, which have both moments. The variance becomes bias-corrected, by what
  // each one's own steps and settings say; then those that never took a step get the step count of their
  // group. False, changing nothing, where all of the variance is zero. Waits for a GPU.
  bool freeze(const OneBitStates& states, const std::vector<GroupSettings>& settings);
  // Goes on from states whose variance is frozen already, from this rank's errors (names as export_errors
  // writes them, none for zeros) in a state of that version, and from what only the rule has. Throws
  // InvalidArgument for what does not fit; then this is of no use. Else set_floors() comes before a step.
  void go_on(const OneBitStates& states, const NamedTensors& errors, int64_t errors_version,
             const NamedTensors& of_rule);

  // Computes the floors from the frozen variance. All shard ranks call it together.
  void set_floors(const kernels::GradientCheck* check = nullptr);

  bool compresses() const { return buckets_.front()->exchange() != nullptr; }
  // Throws CommunicationError on every rank where what they exchange differs. `in_lanes`: momentum then
  // travels beside what else is on its way.
  void agree(int64_t step, bool in_lanes);
  // See OneBitExchange::check.
  void check(bool wait);
  int64_t bytes_sent() const;

  // ---- One step: begin (the optimizer), then the rest (the engine), in this order. ----

  // `local_weight` as in StepInputs, `attempt` counts steps, a refresh comes every so many (0: never).
  struct Step {
    OneBitKind kind = OneBitKind::dense;
    double local_weight = 1;
    int64_t attempt = 0;
    int64_t refresh_every = 0;
  };
  // Throws Error where an exchange failed before.
  void begin(const Step& step);
  // What stored gradients of this rank must be multiplied with besides the average.
  double local_weight() const { return step_.kind == OneBitKind::compressed ? step_.local_weight : 1; }

  // Throws InvalidArgument, in one sentence, where entries are no longer what the flat buffers were made of.
  void check_fits(const std::vector<const ParameterEntry*>& entries) const;
  // The entry with its place among the tensors, and its gradient in this step, null for none.
  void set_tensor(const ParameterEntry& entry, const void* gradient, const GroupSettings& settings);
  // Sends what changed.
  void prepare(const std::vector<GroupSettings>& settings);
  // The guard looks at all stored gradients as if those of the workers, whose noise does not cancel, had been
  // added. `averaged`: partial sums of squares of all others, on the device. Where it clips by the norm of
  // the step before, each bucket of a compressed step is clipped by itself.
  void look(GradientGuard& guard, const double* averaged, int64_t count);
  void step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);

  // ---- A compressed step that starts before begin(), bucket by bucket, in the order of their turns. ----

  size_t tensors() const { return places_.size(); }
  size_t turn_of(size_t tensor) const { return buckets_.size() - 1 - places_[tensor].bucket; }
  // The numbers of the bucket's tensors, [first, second).
  std::pair<size_t, size_t> tensors_at(size_t turn) const;
  // After set_tensor for all of these: its momentum leaves, whatever the gradients are. The step then goes on
  // with the same inputs. `guard`: the step's, if it clips by the norm of the step before; else null.
  void start_ahead(size_t turn, const Step& step, const kernels::StepScalars* scalars,
                   const GradientGuard* guard);
  // Serves those for which all messages have come; never waits.
  void serve_ahead();

  // ---- What others want to know. ----

  // Returns what was lost when this rank rounded in the last exchange, relative to what it rounded; 0 before.
  double compression_error() const;
  // The momentum in fp32, as "NAME/exp_avg", and what only the rule has.
  void export_shared(NamedTensors& state) const;
  // If there is an exchange, writes "NAME/worker_error" in the parameter's shape, and "NAME/server_error" for
  // what this rank serves of it, in memory order, which "NAME/strides" tells if it is not row-major. Without
  // one it writes nothing, or after errors were joined and until the next step "NAME/momentum_error".
  void export_errors(NamedTensors& state) const;
  // These two take the name of a tensor; they return 1 if there is none of that name.
  double lamb_factor(const std::string& name) const;
  double momentum_scale(const std::string& name) const;
  // Said once, at the freeze: how much of the variance lies below its floor, and where most. The shard ranks
  // call together.
  std::string describe_floors() const;
  // The tensors' names from now on, in their order.
  void rename(const std::vector<std::string>& names);

 private:
  // A tensor: number `index` of the bucket.
  struct Place {
    size_t bucket;
    size_t index;
  };

  const OneBitTensor& tensor(size_t i) const {
    return buckets_[places_[i].bucket]->tensors()[places_[i].index];
  }
  const OneBitBucket* bucket_of(const std::string& name) const;
  // Calls f(bucket, states of its tensors).
  template <class F>
  void for_buckets(const OneBitStates& states, const F& f) const;
  std::pair<at::Tensor, int64_t> sum_and_count_of_variance() const;
  at::Tensor sums_of_workers(const at::Tensor& own) const;
  OneBitBucket& at_turn(size_t turn) const { return *buckets_[buckets_.size() - 1 - turn]; }
  double* look_at_bucket(size_t b);
  void clip_bucket(size_t b, const GradientGuard& guard, double local_weight, const double* sum_of_squares);
  void start_bucket(size_t turn, const kernels::StepScalars* scalars, const kernels::GradientCheck* check);
  void compressed_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);

  std::vector<std::unique_ptr<OneBitBucket>> buckets_;
  std::vector<Place> places_;  // of all tensors, in their order
  at::Device device_;
  std::shared_ptr<Communicator> shard_ranks_;
  Step step_;
  size_t started_ = 0, served_ = 0;  // turns of the coming step
  // fp64: sums of squares of averaged gradients, the joint one, of own gradients, and by bucket where there
  // are several.
  at::Tensor sums_;
  // fp64, by bucket: what its gradients are multiplied with in the coming compressed step; undefined where
  // that is the scalars' factor.
  at::Tensor clipped_;
};

}  // namespace pacer::detail
