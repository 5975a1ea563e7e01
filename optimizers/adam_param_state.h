// What pacer's optimizers remember of one parameter, in the shape LibTorch's optimizers have it: entries of
// Optimizer::state(), with the getters and setters of torch::optim::AdamParamState.
//
// The first four fields of every state lie where torch::optim::AdamParamState and AdamWParamState have
// theirs. So static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(key)).exp_avg().zero_(), which
// LibTorch's users write, changes what it says, step() included. A state of torch's type that is put into
// Optimizer::state() becomes one of the optimizer's own at the next step, with the same tensors where their
// dtype, device and memory order are those of the optimizer's.
#pragma once

#include <cstdint>
#include <memory>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/kernels/math/adam.h>

namespace pacer {

namespace detail {
class StepClock;
class StepEngine;
class StepGroups;
}  // namespace detail

// The fields they share. Tensors have the parameter's shape and device; their dtype is fp32 (fp64
// for fp64 parameters, bf16 for bf16 parameters rounded to nearest without master weights, codes with state_bits(8)).
class FusedAdamStateFields : public torch::optim::OptimizerParamState {
 public:
  FusedAdamStateFields() = default;
  // A copy is a snapshot: it shares the tensors but no longer follows the optimizer's step count.
  FusedAdamStateFields(const FusedAdamStateFields& other);
  FusedAdamStateFields& operator=(const FusedAdamStateFields& other);
  FusedAdamStateFields(FusedAdamStateFields&&) noexcept = default;
  FusedAdamStateFields& operator=(FusedAdamStateFields&&) noexcept = default;
  ~FusedAdamStateFields() override = default;

  // Number of steps applied to this parameter. On a GPU with finite_check, or after a CUDA graph capture,
  // only the device knows the number and reading it waits for the device. What one reads through torch's type
  // is then the host's count, which has the skipped steps in it and not those of a graph's replays.
  int64_t step() const;
  FusedAdamStateFields& step(int64_t steps);

  // ScheduleFreeAdamW: what the average has taken in of this parameter's steps; zeros in all others. Reading
  // it waits for the device where reading step() does.
  kernels::AverageWeights average() const;
  FusedAdamStateFields& average(const kernels::AverageWeights& average);
  // Whether the optimizer of such states averages, so that files hold average().
  virtual bool averages() const { return false; }

 private:
  int64_t step_ = 0;  // the host's count; it and the next three are where torch's states have them

 public:
  // First and second moment; the running maximum of the second (amsgrad only, else undefined).
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);
  TORCH_ARG(torch::Tensor, max_exp_avg_sq);
  // MasterWeights::fp32: the fp32 copy. MasterWeights::remainder: its 16 low bits, as int16. MasterWeights::remainder_8:
  // int8, how many 127ths of half the spacing of bf16 numbers it lies above the parameter. Else undefined.
  TORCH_ARG(torch::Tensor, master);
  TORCH_ARG(torch::Tensor, remainder);
  // OneBitLamb: two fp64 numbers, the mean of the trust ratios so far and how many there were; once the
  // variance is frozen the mean is corrected for its start at 0. Else undefined.
  TORCH_ARG(torch::Tensor, trust_average);
  // Muon with normalize_rows: the running mean of squares of each row, fp32, or fp64 for fp64 parameters. Else
  // undefined.
  TORCH_ARG(torch::Tensor, row_moment);
  // state_bits(8): the moments are codes, exp_avg int8 and exp_avg_sq uint8 of the parameter's shape, and these are their
  // scales, an fp16 number for every 32 elements in the order of the codes' memory. Else undefined.
  TORCH_ARG(torch::Tensor, exp_avg_scale);
  TORCH_ARG(torch::Tensor, exp_avg_sq_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  // The name under which the tensor of that name is saved: torch's, where torch's optimizer of the same rule calls it otherwise.
  virtual const char* saved_name(const char* field) const { return field; }
  // Whether torch's optimizer of the same rule counts no steps, so that a state may lack the number. One with tensors has then
  // taken a step.
  virtual bool may_lack_step() const { return false; }

  // For the optimizer: the clock that counts this parameter's steps; null before the first step, and where
  // the number was set since the last one.
  std::shared_ptr<const detail::StepClock> clock() const;

 private:
  friend class detail::StepEngine;
  friend class detail::StepGroups;

  // From now on the clock counts. `steps` is the host's count of the clock.
  void follow(std::shared_ptr<const detail::StepClock> clock);
  bool follows(const detail::StepClock* clock, int64_t steps) const {
    return clock_.get() == clock && step_ == steps;
  }
  void count_step() { ++step_; }
  // What the host knows of the clock's average.
  void note_average();

  std::shared_ptr<const detail::StepClock> clock_;
  kernels::AverageWeights average_;  // the host's
};

// Equal counts and equal tensors, as LibTorch compares its optimizers' states.
bool operator==(const FusedAdamStateFields& left, const FusedAdamStateFields& right);

// The fields with a clone() of the state that derives from them.
template <class State>
class CloneableStateFields : public FusedAdamStateFields {
 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<State>(static_cast<const State&>(*this));
  }
};

struct FusedAdamParamState : public CloneableStateFields<FusedAdamParamState> {};
struct FusedAdamWParamState : public CloneableStateFields<FusedAdamWParamState> {};
// max_exp_avg_sq stays undefined: LAMB has no amsgrad.
struct FusedLambParamState : public CloneableStateFields<FusedLambParamState> {};
// exp_avg is the momentum buffer, undefined where the momentum is 0, and exp_avg_sq and max_exp_avg_sq stay undefined. The number
// of steps begins with the buffer. torch::optim::SGDParamState is another class: a cast to it is not allowed.
struct FusedSgdParamState : public CloneableStateFields<FusedSgdParamState> {
  // exp_avg by its name in torch.
  FusedSgdParamState& momentum_buffer(const torch::Tensor& buffer) {
    exp_avg(buffer);
    return *this;
  }
  const torch::Tensor& momentum_buffer() const noexcept { return exp_avg(); }
  torch::Tensor& momentum_buffer() noexcept { return exp_avg(); }
  const char* saved_name(const char* field) const override;
  bool may_lack_step() const override { return true; }
};
// exp_avg is the mean of squares, exp_avg_sq the momentum buffer, undefined where the momentum is 0, and max_exp_avg_sq the mean
// of gradients, undefined where the rule is not centered: in this order torch::optim::RMSpropParamState has them.
struct FusedRmspropParamState : public CloneableStateFields<FusedRmspropParamState> {
  // The three by their names in torch.
  const torch::Tensor& square_avg() const noexcept { return exp_avg(); }
  const torch::Tensor& momentum_buffer() const noexcept { return exp_avg_sq(); }
  const torch::Tensor& grad_avg() const noexcept { return max_exp_avg_sq(); }
  const char* saved_name(const char* field) const override;
};
// max_exp_avg_sq stays undefined, and exp_avg_sq where the group's options say orthogonalize: exp_avg is Muon's
// momentum then.
struct MuonParamState : public CloneableStateFields<MuonParamState> {};
// The same, of this rank: where ranks send each other what they made of their momentum, each has its own.
struct OneBitMuonParamState : public CloneableStateFields<OneBitMuonParamState> {};
// max_exp_avg_sq stays undefined. After the freeze exp_avg_sq is the frozen variance, bias-corrected, and
// exp_avg is undefined: the momentum lies with the optimizer, as signs or whole.
struct OneBitAdamParamState : public CloneableStateFields<OneBitAdamParamState> {};
// The same with LAMB's trust average.
struct OneBitLambParamState : public CloneableStateFields<OneBitLambParamState> {};
// max_exp_avg_sq stays undefined. exp_avg holds z, the weights that the steps move.
struct ScheduleFreeAdamWParamState : public CloneableStateFields<ScheduleFreeAdamWParamState> {
  bool averages() const override { return true; }
};

}  // namespace pacer
