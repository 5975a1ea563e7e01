// Options of FusedLamb. Setters chain: FusedLambOptions(2e-3).weight_decay(0.01).max_coeff(0.3).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/adam_options.h>

namespace pacer {

// LAMB (You et al., arXiv:1904.00962, algorithm 2).
struct FusedLambOptions : public torch::optim::OptimizerCloneableOptions<FusedLambOptions> {
  using betas_t = std::tuple<double, double>;

  FusedLambOptions(double learning_rate = 1e-3) : lr_(learning_rate) {}

  // Learning rate, >= 0.
  TORCH_ARG(double, lr) = 1e-3;
  // Decay rates of the first and second moment, each in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  // Added to the denominator, outside the square root, >= 0. LAMB's customary value, not Adam's 1e-8.
  TORCH_ARG(double, eps) = 1e-6;
  // Added to the update as weight_decay * parameter, before the trust ratio scales it; >= 0.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  // Lies where torch's options have amsgrad, which this rule does not have: set through a cast, it is
  // refused.
  bool amsgrad_ = false;

 public:
  bool wants_amsgrad() const { return amsgrad_; }
  // See FusedAdamOptions::initial_lr.
  TORCH_ARG(std::optional<double>, initial_lr);
  // Correct both moments for their start at zero.
  TORCH_ARG(bool, bias_correction) = true;
  // The trust ratio |parameter| / |update| is kept between these; 0 <= min_coeff <= max_coeff.
  TORCH_ARG(double, min_coeff) = 0.01;
  TORCH_ARG(double, max_coeff) = 10;
  // False: the trust ratio is 1. Customary for biases and the parameters of normalisations.
  TORCH_ARG(bool, adapt) = true;
  // See FusedAdamOptions.
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

bool operator==(const FusedLambOptions& left, const FusedLambOptions& right);

}  // namespace pacer
