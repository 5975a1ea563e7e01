// Measures the model now and then with a function of the user's, in evaluation mode as Session::evaluate has
// it, and hands the value to EarlyStopping, SaveBest and Metrics.
//
//   session.use(pacer::Validation(500, [&] { return mean_loss(*model, validation_set); }))
//       .use(pacer::EarlyStopping(/*patience=*/3))
//       .use(pacer::SaveBest("run/best"));
//   while (!session.should_stop() && session.progress().step < 100'000) { ... }
//
// The function runs after each `every`-th step, and in finish() where the last step was not measured yet.
// With several ranks each rank runs it, on its own share of the data, and the value is the mean over the
// ranks, added up in rank order, so that all of them decide alike.
//
// A function that returns a number waits for the GPU: choose `every` so that this is rare. It must leave
// model and optimizer as they are, and what it keeps itself is not part of checkpoints.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>

namespace pacer {

struct ValidationOptions {
  // Steps between two measurements, >= 1.
  ValidationOptions(int64_t every) : every_(every) {}
  TORCH_ARG(int64_t, every);
  // The name of the value in records.
  TORCH_ARG(std::string, name) = "validation_loss";
  // An accuracy rather than a loss: EarlyStopping and SaveBest look for the largest value.
  TORCH_ARG(bool, larger_is_better) = false;
  // How long ranks wait for the slowest.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
};

class Validation : public Hook {
 public:
  // Throws InvalidArgument for `every` below 1, an empty name and an empty function.
  Validation(ValidationOptions options, std::function<double()> measure);

  std::string hook_name() const override { return "validation"; }
  Slot slot() const override { return Slot::validate; }
  bool exclusive() const override { return true; }
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // Both pass on what the function throws; with several ranks every rank throws then, an Error that names the
  // first rank where it failed.
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;

 private:
  void measure_at(int64_t step);
  double mean_over_ranks(const std::function<double()>& own) const;

  ValidationOptions options_;
  std::function<double()> measure_;
  SessionParts* parts_ = nullptr;
};

}  // namespace pacer
