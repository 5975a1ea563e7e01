// Options of FusedRmsprop. Setters chain: FusedRmspropOptions(0.01).alpha(0.9).momentum(0.9).centered(true).
#pragma once

#include <optional>

#include <torch/optim/optimizer.h>

#include <pacer/core/option.h>
#include <pacer/optimizers/optimizer_options.h>

namespace torch::optim {
struct RMSpropOptions;
}  // namespace torch::optim

namespace pacer {

// The options of RMSprop. The first six lie where torch::optim::RMSpropOptions has them, so that
// static_cast<torch::optim::RMSpropOptions&>(group.options()).lr(0.01), which LibTorch's users write, sets what it says.
template <class Own>
struct RmspropOptionsOf : public torch::optim::OptimizerCloneableOptions<Own> {
  // See FusedAdamOptions.
  PACER_OPTION(double, lr) = 1e-2;
  // The decay rate of the means of squares and of gradients, in [0, 1).
  PACER_OPTION(double, alpha) = 0.99;
  // See FusedAdamOptions.
  PACER_OPTION(double, eps) = 1e-8;
  // See FusedAdamOptions.
  PACER_OPTION(double, weight_decay) = 0;
  // See MuonOptions.
  PACER_OPTION(double, momentum) = 0;
  // The square of the mean gradient is taken from the mean of squares, so that gradients are divided by their deviation.
  PACER_OPTION(bool, centered) = false;
  // See FusedSgdOptions.
  PACER_OPTION(bool, maximize) = false;
  // See FusedAdamOptions.
  PACER_OPTION(std::optional<double>, initial_lr);
  // See FusedAdamOptions.
  PACER_OPTION(MasterWeights, master_weights) = MasterWeights::automatic;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

// RMSprop, as torch::optim::RMSprop has it; weight decay is added to the gradient (L2).
struct FusedRmspropOptions : public RmspropOptionsOf<FusedRmspropOptions>,
                             public StepOptionsOf<FusedRmspropOptions> {
  FusedRmspropOptions(double learning_rate = 1e-2) { lr(learning_rate); }
  FusedRmspropOptions(const torch::optim::RMSpropOptions& options) { take(options); }

  // Takes over what torch's options have; the others stay.
  void take(const torch::optim::RMSpropOptions& torch);

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Options are equal if all fields are.
bool operator==(const FusedRmspropOptions& left, const FusedRmspropOptions& right);

}  // namespace pacer
