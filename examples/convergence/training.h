// One run: one arm trained from one seed. Everything that an arm does not choose (weights, batches, schedule,
// validation) depends on the settings and the seed only.
#pragma once

#include <string>

#include "corpus.h"
#include "results.h"
#include "settings.h"

namespace convergence {

// Hears of progress while a run goes on. Points arrive in order, the last when the run has ended.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  virtual void on_training(const CurvePoint& point, double learning_rate) = 0;
  virtual void on_validation(const CurvePoint& point) = 0;
};

// What the runs train on.
struct Machine {
  std::string device;       // "cpu" or "cuda"
  std::string description;  // for people, with the number of threads
};

// Applies device, precision and threads, once per program and before the first run. Throws
// pacer::InvalidArgument where they ask for a CUDA device and there is none.
Machine prepare_machine(const Settings& settings);

// Number of trainable weights of the model that `settings` describe.
int64_t count_parameters(const Settings& settings);

// Trains one arm. Throws pacer::Error where the loss is no longer finite.
Run train(const std::string& arm, uint64_t seed, const Settings& settings, const Machine& machine,
          const Corpus& corpus, RunObserver* observer);

}  // namespace convergence
