// Options of FusedAdam and FusedAdamW. Two separate, complete structs, like LibTorch's: they differ in where
// weight decay enters and in its default. Setters chain:
// FusedAdamWOptions(3e-4).betas({0.9, 0.95}).weight_decay(0.1).
#pragma once

#include <pacer/optimizers/optimizer_options.h>

namespace torch::optim {
struct AdamOptions;
struct AdamWOptions;
}  // namespace torch::optim

namespace pacer {

// The options of Adam and AdamW; `Torch` are those of torch's optimizer of the same rule.
template <class Own, class Torch>
struct AdamOptionsOf : public FusedOptionsOf<Own> {
  // Takes over what torch's options have; the others stay.
  void take(const Torch& torch);

  // Divide by the running maximum of the second moment (Reddi et al., arXiv:1904.09237).
  Own& amsgrad(bool on) {
    this->amsgrad_ = on;
    return static_cast<Own&>(*this);
  }
  const bool& amsgrad() const noexcept { return this->amsgrad_; }
  bool& amsgrad() noexcept { return this->amsgrad_; }
};

// Adam (Kingma & Ba, arXiv:1412.6980); weight decay is added to the gradient (L2).
struct FusedAdamOptions : public AdamOptionsOf<FusedAdamOptions, torch::optim::AdamOptions> {
  FusedAdamOptions(double learning_rate = 1e-3) { lr(learning_rate); }
  FusedAdamOptions(const torch::optim::AdamOptions& options) { take(options); }
};

// AdamW (Loshchilov & Hutter, arXiv:1711.05101); weight decay is taken from the parameter, scaled by the
// learning rate.
struct FusedAdamWOptions : public AdamOptionsOf<FusedAdamWOptions, torch::optim::AdamWOptions> {
  FusedAdamWOptions(double learning_rate = 1e-3) { lr(learning_rate).weight_decay(1e-2); }
  FusedAdamWOptions(const torch::optim::AdamWOptions& options) { take(options); }
};

}  // namespace pacer
