// The compressed entries of a 1-bit optimizer once the variance is frozen, in buckets that are exchanged each
// by itself. They belong to the StepEngine, which calls them in each step as it calls its tables; the
// OneBitOptimizer says before which kind of step comes.
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
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

class CompressedParameters {
 public:
  // `tensors` in the order of the parameters. All buckets, at least one, have an exchange or none.
  // `shard_ranks` as theirs.
  CompressedParameters(const std::vector<OneBitTensor>& tensors, const OneBitSetup& setup,
                       std::shared_ptr<Communicator> shard_ranks);

  // From the states of the tensors, which have both moments. The variance becomes bias-corrected, by what
  // each one's own steps and settings say; then those that never took a step get the step count of their
  // group. False, changing nothing, where all of the variance is zero. Waits for a GPU.
  bool freeze(const OneBitStates& states, const std::vector<GroupSettings>& settings);
  // Goes on from states whose variance is frozen already, from this rank's errors (names as export_errors
  // writes them, none for zeros) in a state of that version, and from what only the rule has. Throws
  // InvalidArgument for what does not fit; then this is of no use. Else set_floors() comes before a step.
  void go_on(const OneBitStates& states, NamedTensors errors, int64_t errors_version, NamedTensors of_rule);

  // Computes the floors from the frozen variance. All shard ranks call it together.
  void set_floors(const kernels::GradientCheck* check = nullptr);

  bool compresses() const { return buckets_.front()->exchange() != nullptr; }
  const std::vector<std::unique_ptr<OneBitBucket>>& buckets() const { return buckets_; }
  // Compares once what ranks exchange, where they are in step. Throws CommunicationError on every rank where
  // it differs. `in_lanes`: momentum then travels beside what else is on its way.
  void agree(int64_t step, bool in_lanes);
  bool has_agreed() const { return has_agreed_; }

  // ---- One step: begin (the optimizer), then the rest (the engine), in this order. ----

  // `local_weight` as in StepInputs, `attempt` counts steps, a refresh comes every so many (0: never).
  struct Step {
    OneBitKind kind = OneBitKind::dense;
    double local_weight = 1;
    int64_t attempt = 0;
    int64_t refresh_every = 0;
  };
  // Comes again where buckets have started since, and then changes nothing. Throws Error where an exchange
  // failed before.
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

  // ---- Between two begin() of a compressed step: buckets that start early, in the order of their turns. ----

  size_t tensors() const { return places_.size(); }
  size_t turn_of(size_t tensor) const;
  // The numbers of the bucket's tensors, [first, second).
  std::pair<size_t, size_t> tensors_at(size_t turn) const;
  // After set_tensor for all of these: its momentum leaves, whatever the gradients are. The step then goes on
  // with the same inputs. `guard`: the step's, if it clips by the norm of the step before; else null.
  void start(size_t turn, const kernels::StepScalars* scalars, const GradientGuard* guard);
  // Serves those for which all messages have come; never waits.
  void serve();

  // ---- What others want to know. ----

  // The bytes that this rank sent to others in exchanges; 0 where nothing is compressed.
  int64_t bytes_sent() const;
  // Returns what was lost when this rank rounded in the last exchange, relative to what it rounded; 0 before.
  double compression_error() const;
  // Those of the tensor of that name; all 1 if there is none.
  OneBitLambKernels::Numbers lamb_numbers(const std::string& name) const;
  // Said once, at the freeze: how much of the variance lies below its floor, and where most. The shard ranks
  // call together.
  std::string describe_floors() const;
  // The tensors' names from now on, in their order.
  void rename(const std::vector<std::string>& names);

 private:
  // A tensor: number `index` of the bucket.
  struct Place {
    OneBitBucket* bucket;
    size_t index;

    const OneBitTensor& tensor() const { return bucket->tensors()[index]; }
  };

  // Calls f(bucket, states of its tensors).
  template <class F>
  void for_buckets(const OneBitStates& states, const F& f) const;
  std::pair<at::Tensor, int64_t> sum_and_count_of_variance() const;
  size_t number_at(size_t turn) const { return buckets_.size() - 1 - turn; }
  OneBitBucket& at_turn(size_t turn) const { return *buckets_[number_at(turn)]; }
  at::Tensor factor_at(size_t turn) const;
  void look_at_bucket(size_t b, const GradientGuard* clipping);
  void compressed_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);

  std::vector<std::unique_ptr<OneBitBucket>> buckets_;
  std::vector<Place> places_;  // of all tensors, in their order
  kernels::UpdateRule rule_;
  at::Device device_;
  std::shared_ptr<Communicator> shard_ranks_;
  bool has_agreed_ = false;
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
