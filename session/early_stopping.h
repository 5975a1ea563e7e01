// Asks for the end of training where validation no longer improves: Session::should_stop() becomes true once
// `patience` measurements in a row were not better than the best by more than `min_delta`. The loop stays the
// user's, who looks at should_stop() and calls finish().
//
// A run that is resumed after it had stopped asks for the end at once; resume with more patience to go on.
#pragma once

#include <cstdint>
#include <string>

#include <torch/arg.h>

#include <pacer/hooks/best_value.h>
#include <pacer/hooks/hook.h>

namespace pacer {

struct EarlyStoppingOptions {
  EarlyStoppingOptions(int64_t patience) : patience_(patience) {}
  // How many measurements in a row may be no better than the best before, >= 1.
  TORCH_ARG(int64_t, patience);
  // What a value must be better by to count; in the unit of the value, finite, >= 0.
  TORCH_ARG(double, min_delta) = 0;
};

class EarlyStopping : public Hook {
 public:
  // Throws InvalidArgument for options out of range.
  explicit EarlyStopping(EarlyStoppingOptions options);

  std::string hook_name() const override { return "early_stopping"; }
  Slot slot() const override { return Slot::decide; }
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // Throws InvalidArgument where the Session has no Validation hook.
  void start(const Progress& progress) override;
  void after_step(StepReport& report) override;
  // The best value, its step, and the measurements since.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  const BestValue& best() const { return best_; }

 private:
  void decide();

  EarlyStoppingOptions options_;
  BestValue best_;
  SessionParts* parts_ = nullptr;
};

}  // namespace pacer
