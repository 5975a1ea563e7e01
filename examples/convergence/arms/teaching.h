// Two ways of compressing that do not work, to be trained beside the one that does, and a look at how far
// parameters move: hooks for arms of the study. The two round on every rank alike, so that nothing travels
// less: they show what the loss does, not bytes.
#pragma once

#include <memory>
#include <vector>

#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/hooks/hook.h>
#include <pacer/hooks/session_parts.h>

namespace convergence {

// The obvious idea: gradients become signs times one scale, with error feedback, and go into Adam as if
// nothing had happened. Its variance then sees the squares of the scale, the same for all elements, and
// adapts to nothing.
class SignedGradients : public pacer::Hook {
 public:
  std::string hook_name() const override { return "signed_gradients"; }
  pacer::Slot slot() const override { return pacer::Slot::optimize; }
  void attach(pacer::SessionParts& parts) override;
  void gradients_ready(const pacer::Progress& progress) override;
  void save(pacer::NamedTensors& state) const override;
  void load(const pacer::NamedTensors& state) override;

 private:
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<pacer::CompressedAllReduce> signs_;
};

// 1-bit Adam without error feedback: what rounding lost is thrown away after every step.
class ForgottenErrors : public pacer::Hook {
 public:
  std::string hook_name() const override { return "forgotten_errors"; }
  pacer::Slot slot() const override { return pacer::Slot::record; }
  void attach(pacer::SessionParts& parts) override { parts_ = &parts; }
  void after_step(pacer::StepReport& report) override;

 private:
  pacer::SessionParts* parts_ = nullptr;
};

// The largest change of any parameter in one step so far, in units of the learning rate of that step: about 1
// under Adam. Starts anew where a run is resumed.
class LargestUpdate : public pacer::Hook {
 public:
  explicit LargestUpdate(double* largest) : largest_(largest) {}
  std::string hook_name() const override { return "largest_update"; }
  pacer::Slot slot() const override { return pacer::Slot::record; }
  void attach(pacer::SessionParts& parts) override { parts_ = &parts; }
  void gradients_ready(const pacer::Progress& progress) override;
  void after_step(pacer::StepReport& report) override;

 private:
  pacer::SessionParts* parts_ = nullptr;
  double* largest_;
  std::vector<at::Tensor> before_;
};

}  // namespace convergence
