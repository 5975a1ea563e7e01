// Options of FusedSgd. Setters chain: FusedSgdOptions(0.1).momentum(0.9).weight_decay(5e-4).
#pragma once

#include <optional>

#include <torch/optim/optimizer.h>

#include <pacer/core/option.h>
#include <pacer/optimizers/optimizer_options.h>

namespace torch::optim {
struct SGDOptions;
}  // namespace torch::optim

namespace pacer {

// The options of SGD. The first five lie where torch::optim::SGDOptions has them, so that
// static_cast<torch::optim::SGDOptions&>(group.options()).lr(0.01), which LibTorch's users write, sets what it says.
template <class Own>
struct SgdOptionsOf : public torch::optim::OptimizerCloneableOptions<Own> {
  // See FusedAdamOptions.
  PACER_OPTION(double, lr) = 1e-3;
  // See MuonOptions.
  PACER_OPTION(double, momentum) = 0;
  // How much of a gradient does not enter the momentum, in [0, 1); the first one enters whole, as in torch.
  PACER_OPTION(double, dampening) = 0;
  // See FusedAdamOptions.
  PACER_OPTION(double, weight_decay) = 0;
  // See MuonOptions.
  PACER_OPTION(bool, nesterov) = false;
  // Steps go up the gradient.
  PACER_OPTION(bool, maximize) = false;
  // See FusedAdamOptions.
  PACER_OPTION(std::optional<double>, initial_lr);
  // See FusedAdamOptions.
  PACER_OPTION(MasterWeights, master_weights) = MasterWeights::automatic;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double learning_rate) override { lr(learning_rate); }
};

// SGD with momentum, as torch::optim::SGD has it; weight decay is added to the gradient (L2).
struct FusedSgdOptions : public SgdOptionsOf<FusedSgdOptions>, public StepOptionsOf<FusedSgdOptions> {
  FusedSgdOptions(double learning_rate = 1e-3) { lr(learning_rate); }
  FusedSgdOptions(const torch::optim::SGDOptions& options) { take(options); }

  // Takes over what torch's options have; the others stay.
  void take(const torch::optim::SGDOptions& torch);

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Options are equal if all fields are.
bool operator==(const FusedSgdOptions& left, const FusedSgdOptions& right);

}  // namespace pacer
