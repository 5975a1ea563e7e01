// A third way to clip after the freeze of 1-bit Adam, to be trained beside the library's: a rank knows only
// its own gradient there, and guesses the norm of the mean from a ratio that was measured while both were
// known, in the warm-up. For an arm of the study; everything here goes through what the library offers.
#pragma once

#include <string>
#include <vector>

#include <pacer/hooks/hook.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/onebit_adam.h>

namespace convergence {

// 1-bit Adam whose gradients also stay each rank's own in the second half of the warm-up, where ClippingRatio
// averages them after having looked. Only with that hook, and with freeze_step.
class ProbingOneBitAdam : public pacer::OneBitAdam {
 public:
  using OneBitAdam::OneBitAdam;
  // Whether the coming step is one of those.
  bool probes() const;
  pacer::GradientScope gradient_scope() const override;
};

// In a step that probes: ratio = sqrt(mean over ranks of |own gradient|^2 / W) / |mean gradient|, then
// gradients are added over ranks. After the freeze the guard clips to max_norm times the mean of those
// ratios, that is, as if the joint norm had been divided by it.
class ClippingRatio : public pacer::Hook {
 public:
  // max_norm: that of GradientClipping, 0 where there is none.
  explicit ClippingRatio(double max_norm) : max_norm_(max_norm) {}
  std::string hook_name() const override { return "clipping_ratio"; }
  // After the gradients have arrived.
  pacer::Slot slot() const override { return pacer::Slot::clip; }
  std::string agreement() const override { return "norm " + std::to_string(max_norm_); }
  // Throws pacer::InvalidArgument where the optimizer is no ProbingOneBitAdam.
  void attach(pacer::SessionParts& parts) override;
  void gradients_ready(const pacer::Progress& progress) override;
  void save(pacer::NamedTensors& state) const override;
  void load(const pacer::NamedTensors& state) override;

 private:
  void probe();

  double max_norm_;
  pacer::SessionParts* parts_ = nullptr;
  ProbingOneBitAdam* optimizer_ = nullptr;
  double sum_of_ratios_ = 0;
  int64_t probes_ = 0;
};

}  // namespace convergence
