// A run: each rank a thread with its own copy of the model and its own batches, one optimizer for all.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "options.h"
#include "text.h"

namespace scales {

struct Outcome {
  double held_out = 0;       // nats a token, the mean of the evaluations in the last sixth of the run
  double training = 0;       // the mean over all ranks and the last tenth of the steps
  double seconds = 0;        // of training and evaluation
  int64_t bytes_a_step = 0;  // that a rank sent in the last step
  int64_t parameters = 0;    // elements
  std::vector<at::Tensor> snapshots;  // all parameters in one row: initial values, then as asked for
};

// The number of most frequent words that a model of words knows.
constexpr int64_t kMostWords = 4096;

// `snapshot_steps`: after which steps to keep the parameters, in rising order. Throws what a rank threw.
Outcome train(const Options& options, const Text& text, const std::vector<int64_t>& snapshot_steps = {});

}  // namespace scales
