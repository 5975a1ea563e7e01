// Options of FusedAdam and FusedAdamW. Two separate, complete structs, like LibTorch's: they differ in where
// weight decay enters and in its default. Setters chain:
// FusedAdamWOptions(3e-4).betas({0.9, 0.95}).weight_decay(0.1).
//
// The first five fields of every options struct of pacer lie where torch::optim::AdamOptions and AdamWOptions
// have theirs. So static_cast<torch::optim::AdamWOptions&>(group.options()).weight_decay(0), which LibTorch's
// users write, sets what it says. How each field is saved, checked and described is in
// detail/option_fields.h.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/paging.h>

namespace torch::optim {
struct AdamOptions;
struct AdamWOptions;
}  // namespace torch::optim

namespace pacer {

// How a 16-bit parameter keeps the digits its own dtype cannot hold. fp32 and fp64 parameters need none of
// this.
enum class MasterWeights {
  automatic,  // remainder for bf16, fp32 for fp16
  fp32,       // an fp32 copy, 4 bytes per parameter
  remainder,  // bf16 only: the 16 low bits of the fp32 value, 2 bytes per parameter, as exact as fp32
  none,       // bf16 only: no copy; see Rounding
};

// How a bf16 parameter without master weights is rounded after an update.
enum class Rounding {
  nearest,     // moments are bf16 too: 14 bytes moved per parameter, small updates can be lost
  stochastic,  // moments are fp32; unbiased, and a pure function of seed, step and element (Philox4x32-10)
};

// Adam (Kingma & Ba, arXiv:1412.6980); weight decay is added to the gradient (L2).
struct FusedAdamOptions : public torch::optim::OptimizerCloneableOptions<FusedAdamOptions> {
  using betas_t = std::tuple<double, double>;

  FusedAdamOptions(double learning_rate = 1e-3) : lr_(learning_rate) {}
  FusedAdamOptions(const torch::optim::AdamOptions& options);
  // Takes over what torch's options have; the others stay.
  void take(const torch::optim::AdamOptions& torch);

  // Learning rate, >= 0.
  TORCH_ARG(double, lr) = 1e-3;
  // Decay rates of the first and second moment, each in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  // Added to the denominator, outside the square root, >= 0.
  TORCH_ARG(double, eps) = 1e-8;
  // >= 0.
  TORCH_ARG(double, weight_decay) = 0;
  // Divide by the running maximum of the second moment (Reddi et al., arXiv:1904.09237).
  TORCH_ARG(bool, amsgrad) = false;
  // The learning rate that a schedule multiplies with its factor, >= 0. Where it is unset, the schedule first
  // sets it to lr.
  TORCH_ARG(std::optional<double>, initial_lr);
  // Correct both moments for their start at zero.
  TORCH_ARG(bool, bias_correction) = true;
  // True: all gradients are checked before a step. Where one is NaN or infinite, the step changes nothing and
  // counts as skipped. So it does where one is so large that the sum of squares overflows (fp32 within 32,768
  // elements, beyond 1e19). The value must be the same in every group of an optimizer. A check reads the
  // gradients once more.
  TORCH_ARG(bool, finite_check) = false;
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::automatic;
  TORCH_ARG(Rounding, rounding) = Rounding::nearest;
  // The seed of stochastic rounding.
  TORCH_ARG(uint64_t, seed) = 0;
  // State lives in host memory and passes through the GPU in pages. Where this is unset, state is on the
  // parameters' device. It holds for the whole optimizer: set it in the options that the optimizer is made
  // with. It is not saved.
  TORCH_ARG(std::optional<Paging>, paged);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

// AdamW (Loshchilov & Hutter, arXiv:1711.05101); weight decay is taken from the parameter, scaled by the
// learning rate.
struct FusedAdamWOptions : public torch::optim::OptimizerCloneableOptions<FusedAdamWOptions> {
  using betas_t = std::tuple<double, double>;

  FusedAdamWOptions(double learning_rate = 1e-3) : lr_(learning_rate) {}
  FusedAdamWOptions(const torch::optim::AdamWOptions& options);
  // See FusedAdamOptions::take.
  void take(const torch::optim::AdamWOptions& torch);

  // See FusedAdamOptions.
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(std::optional<double>, initial_lr);
  TORCH_ARG(bool, bias_correction) = true;
  TORCH_ARG(bool, finite_check) = false;
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::automatic;
  TORCH_ARG(Rounding, rounding) = Rounding::nearest;
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<Paging>, paged);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

bool operator==(const FusedAdamOptions& left, const FusedAdamOptions& right);
bool operator==(const FusedAdamWOptions& left, const FusedAdamWOptions& right);

}  // namespace pacer
