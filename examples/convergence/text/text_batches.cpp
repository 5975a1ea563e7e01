// Copying bytes into tensors.
#include "text_batches.h"

#include <algorithm>

#include <ATen/ops/empty.h>

namespace convergence {
namespace {

ByteBatch batch_at(const Corpus& corpus, const std::vector<int64_t>& offsets, int64_t sequence) {
  const auto text = at::empty({static_cast<int64_t>(offsets.size()), sequence + 1}, at::kByte);
  auto* row = text.mutable_data_ptr<uint8_t>();
  for (const int64_t offset : offsets) {
    row = std::copy_n(corpus.bytes.begin() + offset, sequence + 1, row);
  }
  return {text.narrow(1, 0, sequence).to(at::kLong), text.narrow(1, 1, sequence).to(at::kLong)};
}

}  // namespace

ByteBatch training_batch(const Corpus& corpus, const Settings& settings, uint64_t seed, int64_t step,
                         int rank) {
  const auto offsets = batch_offsets(seed, step, settings.batch, corpus, settings.sequence);
  const int64_t part = settings.batch / settings.processes;
  const auto begin = offsets.begin() + rank * part;
  return batch_at(corpus, {begin, begin + part}, settings.sequence);
}

std::vector<ByteBatch> validation_batches(const Corpus& corpus, const Settings& settings) {
  const auto offsets = validation_offsets(corpus, settings.validation_sequences, settings.sequence);
  std::vector<ByteBatch> batches;
  for (size_t begin = 0; begin < offsets.size(); begin += static_cast<size_t>(settings.batch)) {
    const size_t end = std::min(offsets.size(), begin + static_cast<size_t>(settings.batch));
    batches.push_back(batch_at(corpus, {offsets.begin() + begin, offsets.begin() + end}, settings.sequence));
  }
  return batches;
}

}  // namespace convergence
