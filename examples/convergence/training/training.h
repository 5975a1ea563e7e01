// One run: one arm trained from one seed. Everything that an arm does not choose (weights, batches, schedule,
// validation) depends on the settings and the seed only.
#pragma once

#include <filesystem>
#include <string>

#include "convergence/machine.h"
#include "convergence/report/results.h"
#include "convergence/settings.h"
#include "convergence/text/corpus.h"
#include "training_curve.h"

namespace convergence {

// What one run is. The settings and the corpus must outlive it.
struct RunPlan {
  std::string arm;
  uint64_t seed;
  const Settings& settings;
  const Corpus& corpus;
  std::filesystem::path folder;  // of its files, which all ranks see
  // Whether others go on from it: it leaves its weights in weights_file(folder), and is called so.
  bool is_base = false;
  std::filesystem::path base_weights = {};  // the file that the run goes on from; empty: new weights

  std::string name() const { return is_base ? "base" : arm; }
};

// The file in which the run of a base leaves its weights.
std::filesystem::path weights_file(const std::filesystem::path& folder);

// Number of trainable weights of the model that `settings` describe.
int64_t count_parameters(const Settings& settings);

// Trains one arm together with the other ranks of machine.world, with checkpoints in the plan's folder. With
// settings.resume it continues from the newest of them, where there is one, and `stored` has the points of
// that run so far. Throws pacer::Error where the loss is no longer finite.
Run train(const RunPlan& plan, const Machine& machine, const Run& stored, RunObserver* observer);

}  // namespace convergence
