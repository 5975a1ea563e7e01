// The text as tensors: training batches as a function of seed and step, and the validation text.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "convergence/settings.h"
#include "corpus.h"

namespace convergence {

// Bytes and the bytes that follow them, int64 (sequences, bytes) each, on the CPU.
using ByteBatch = std::pair<at::Tensor, at::Tensor>;

// Rank `rank`'s part of a step's batch, of full-length sequences: a curriculum cuts them later. The parts of
// all ranks, one after the other, are the batch of a single process. `step` counts from 0.
ByteBatch training_batch(const Corpus& corpus, const Settings& settings, uint64_t seed, int64_t step,
                         int rank);

// The same ones every time, of at most `settings.batch` sequences each.
std::vector<ByteBatch> validation_batches(const Corpus& corpus, const Settings& settings);

}  // namespace convergence
