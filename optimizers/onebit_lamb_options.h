// Options of OneBitLamb. Setters chain:
// OneBitLambOptions(2e-3).freeze_step(2'000).max_coeff(0.3).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/kernels/choices.h>
#include <pacer/optimizers/adam_options.h>

namespace pacer {

// 1-bit LAMB (Li et al., arXiv:2104.06069, algorithm 1).
struct OneBitLambOptions : public torch::optim::OptimizerCloneableOptions<OneBitLambOptions> {
  using betas_t = std::tuple<double, double>;

  OneBitLambOptions(double learning_rate = 1e-3) : lr_(learning_rate) {}

  // ---- Options of a parameter group: each as in FusedLambOptions, but no bias correction by default. ----
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  // Lies where torch's options have amsgrad, which this rule does not have: set through a cast, it is
  // refused.
  bool amsgrad_ = false;

 public:
  bool wants_amsgrad() const { return amsgrad_; }
  TORCH_ARG(std::optional<double>, initial_lr);
  TORCH_ARG(bool, bias_correction) = false;
  TORCH_ARG(double, min_coeff) = 0.01;
  TORCH_ARG(double, max_coeff) = 10;
  // In warm-up the trust ratios are averaged with this decay rate, in [0, 1); after the freeze their mean is
  // the tensor's coefficient.
  TORCH_ARG(double, coeff_beta) = 0.9;
  // A factor multiplies the coefficient: how much the variance would have changed since the freeze. It stays
  // between factor_min and factor_max, 0 < factor_min <= factor_max.
  TORCH_ARG(double, factor_min) = 0.5;
  TORCH_ARG(double, factor_max) = 4.0;
  // From one step to the next the factor changes by at most this share, in [0, 1).
  TORCH_ARG(double, factor_threshold) = 0.1;
  // False: coefficient and factor are 1. Customary for biases and the parameters of normalisations.
  TORCH_ARG(bool, adapt) = true;
  // 16-bit parameters need a master copy or a remainder: MasterWeights::none is refused.
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::automatic;
  // False: the group stays with LAMB for ever, its gradients averaged in full precision. What is fp64 and
  // would be compressed must be in such a group.
  TORCH_ARG(bool, compress) = true;

  // ---- Options of the optimizer, the same in all groups: each as in OneBitAdamOptions. ----
  TORCH_ARG(std::optional<int64_t>, freeze_step);
  TORCH_ARG(std::optional<int64_t>, freeze_automatically);
  TORCH_ARG(bool, allow_early_freeze) = false;
  TORCH_ARG(double, variance_floor) = 0.01;
  TORCH_ARG(ScaleNorm, scale) = ScaleNorm::rms;
  TORCH_ARG(bool, block_scales) = false;
  TORCH_ARG(bool, compress_vectors) = false;
  TORCH_ARG(bool, compress_alone) = false;
  TORCH_ARG(std::optional<int64_t>, bucket_bytes);
  TORCH_ARG(bool, overlap_backward) = false;
  TORCH_ARG(bool, hierarchical) = false;
  TORCH_ARG(bool, one_bit) = true;

 public:
  // Not offered; a compiler that meets it says why.
  template <class Any>
  OneBitLambOptions& paged(const Any&) {
    static_assert(
        sizeof(Any) == 0,
        "1-bit optimizers need their state, and what they could not send, on the GPU in every step; "
        "leave out paged(), or use FusedAdamW or FusedLamb");
    return *this;
  }

  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

bool operator==(const OneBitLambOptions& left, const OneBitLambOptions& right);

}  // namespace pacer
