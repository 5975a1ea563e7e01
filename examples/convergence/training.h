// One run: one arm trained from one seed. Everything that an arm does not choose (weights, batches, schedule,
// validation) depends on the settings and the seed only.
#pragma once

#include <filesystem>
#include <string>

#include "corpus.h"
#include "machine.h"
#include "results.h"
#include "settings.h"
#include "training_curve.h"

namespace convergence {

// Number of trainable weights of the model that `settings` describe.
int64_t count_parameters(const Settings& settings);

// Trains one arm together with the other ranks of machine.world, with checkpoints in `folder`, which all see.
// With settings.resume it continues from the newest of them, where there is one, and `stored` has the points
// of that run so far. Throws pacer::Error where the loss is no longer finite.
Run train(const std::string& arm, uint64_t seed, const Settings& settings, const Machine& machine,
          const Corpus& corpus, const std::filesystem::path& folder, const Run& stored,
          RunObserver* observer);

}  // namespace convergence
