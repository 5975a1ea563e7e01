// What the options of optimizers share. Each optimizer has a struct of its own, like LibTorch's, whose
// constructor sets the defaults that differ. Setters chain in any order.
//
// The first five fields lie where torch::optim::AdamOptions and AdamWOptions have theirs. So
// static_cast<torch::optim::AdamWOptions&>(group.options()).weight_decay(0), which LibTorch's users write,
// sets what it says. How each field is checked and saved is in detail/option_fields.h.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/optim/optimizer.h>

#include <pacer/core/option.h>
#include <pacer/optimizers/paging.h>

namespace pacer {

// How a 16-bit parameter keeps the digits its own dtype cannot hold. fp32 and fp64 parameters need none of
// this.
enum class MasterWeights {
  automatic,    // remainder for bf16, fp32 for fp16
  fp32,         // an fp32 copy, 4 bytes per parameter
  remainder,    // bf16 only: the 16 low bits of the fp32 value, 2 bytes per parameter, as exact as fp32
  none,         // bf16 only: no copy; see Rounding
  remainder_8,  // bf16 only: an int8 correction, 1 byte per parameter; the value is kept to 2^-15 of itself
};

// How a bf16 parameter without master weights is rounded after an update.
enum class Rounding {
  nearest,     // moments are bf16 too: 14 bytes moved per parameter, small updates can be lost
  stochastic,  // moments are fp32; unbiased, and a pure function of seed, step and element (Philox4x32-10)
};

// The options of every optimizer with Adam's moments. `Own` is the struct of one.
template <class Own>
struct OptimizerOptionsOf : public torch::optim::OptimizerCloneableOptions<Own> {
  using betas_t = std::tuple<double, double>;

  // Learning rate, >= 0.
  PACER_OPTION(double, lr) = 1e-3;
  // Decay rates of the first and second moment, each in [0, 1).
  PACER_OPTION(betas_t, betas) = std::make_tuple(0.9, 0.999);
  // Added to the denominator, outside the square root, >= 0.
  PACER_OPTION(double, eps) = 1e-8;
  // How strongly a step pulls parameters to zero, >= 0. Adam, SGD and RMSprop add weight_decay * parameter to the gradient
  // (L2). AdamW, Muon and 1-bit Adam take it from the parameter, times lr. LAMB and 1-bit LAMB add it to the update,
  // before the trust ratio scales that. Schedule-Free AdamW adds it to the update at the weights of training.
  PACER_OPTION(double, weight_decay) = 0;

 protected:
  // An option of Adam and AdamW. In the other rules, which do not have it, it keeps the place of torch's: set
  // through a cast, it is refused.
  bool amsgrad_ = false;

 public:
  bool wants_amsgrad() const { return amsgrad_; }
  // The learning rate that a schedule multiplies with its factor, >= 0. Where it is unset, the schedule first
  // sets it to lr.
  PACER_OPTION(std::optional<double>, initial_lr);
  // Correct both moments for their start at zero.
  PACER_OPTION(bool, bias_correction) = true;
  // How 16-bit parameters keep the digits that their own dtype cannot hold. OneBitAdam and OneBitLamb need a
  // master copy or a remainder and refuse MasterWeights::none.
  PACER_OPTION(MasterWeights, master_weights) = MasterWeights::automatic;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

// Options are equal if all fields are.
template <class Own>
bool operator==(const OptimizerOptionsOf<Own>& left, const OptimizerOptionsOf<Own>& right);

// What optimizers that do not compress are told of their steps, whatever their rule.
template <class Own>
struct StepOptionsOf {
  // True: all gradients are checked before a step. Where one is NaN or infinite, the step changes nothing and
  // counts as skipped. So it does where one is so large that the sum of squares overflows (fp32 within 32,768
  // elements, beyond 1e19). The value must be the same in every group of an optimizer. A check reads the
  // gradients once more.
  PACER_OPTION(bool, finite_check) = false;
  // How bf16 parameters without master weights are rounded.
  PACER_OPTION(Rounding, rounding) = Rounding::nearest;
  // The seed of stochastic rounding.
  PACER_OPTION(uint64_t, seed) = 0;
  // State lives in host memory and passes through the GPU in pages. Where this is unset, state is on the
  // parameters' device. It holds for the whole optimizer: set it in the options that the optimizer is made
  // with. It is not saved.
  PACER_OPTION(std::optional<Paging>, paged);
};

// The options of the optimizers with Adam's moments that do not compress.
template <class Own>
struct FusedOptionsOf : public OptimizerOptionsOf<Own>, public StepOptionsOf<Own> {
  // Bits of a moment: 32, or 8 for FusedAdam, FusedAdamW, FusedLamb, Muon, and the groups of OneBitMuon that take AdamW.
  // In 8 bits both moments together take 2.125 bytes per parameter, the one of Muon's matrices 1.0625: codes, and a scale
  // for every 32 elements. It belongs to the run and is not saved; state of the other format is converted by the next
  // step.
  PACER_OPTION(int64_t, state_bits) = 32;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

}  // namespace pacer
