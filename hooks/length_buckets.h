// Batches of examples of similar length, so that little of a padded batch is padding: an EpochSampler in
// another order, with a budget of tokens in place of a number of examples (Pouransari et al., "Dataset
// Decomposition", arXiv:2405.13226, has the budget, the pieces and the curriculum).
//
//   pacer::LengthBuckets sampler(lengths, pacer::LengthBucketsOptions(/*tokens=*/4096).seed(1));
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, sampler.largest_batch());
//   session.use(sampler);
//
// An epoch is made in this way: all examples are shuffled and go to buckets by their length; each bucket is cut
// into batches of as many examples as the budget holds of its longest; what is left of a bucket is a batch if it
// is no smaller than those of the next longer one, and goes there otherwise; the batches are shuffled. It is a
// pure function of lengths, options, seed and epoch, and the same for any number of ranks, so that a run may go
// on with another.
//
// With several ranks, LengthBuckets(lengths, options, *world), a batch belongs to all of them: rank r of W takes
// its examples r, r + W, r + 2 W, ..., so that all ranks are at the same length at the same time. Every rank
// takes the same number, and up to W - 1 examples of a batch are left out; with `multiple(W)` of one batch an
// epoch, others in each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/epoch_sampler.h>

namespace pacer {

struct LengthBucketsOptions {
  // Tokens of a padded batch, at most, of all ranks together.
  LengthBucketsOptions(int64_t tokens) : tokens_(tokens) {}
  TORCH_ARG(int64_t, tokens);
  // The longest length of each bucket, rising. Empty: 8, 9, ..., 16, 18, ..., 32, 36, ..., 64, 72, ...
  // up to the longest example, so that at most a ninth of any but the shortest is padding.
  TORCH_ARG(std::vector<int64_t>, bounds);
  // Batches have a multiple of so many examples, but for one an epoch.
  TORCH_ARG(int64_t, multiple) = 1;
  // A curriculum by length: an epoch has so many parts with the same number of batches, and each goes from short
  // batches to long ones. 0: batches come in any order.
  TORCH_ARG(int64_t, cycles) = 0;
  // Cuts sequences into pieces whose lengths are bounds, the longest first, so that batches have no padding and
  // nothing is lost. Only a rest below the first bound is shorter. Indices are those of pieces; needs bounds.
  TORCH_ARG(bool, split) = false;
  // Another seed makes other orders.
  TORCH_ARG(uint64_t, seed) = 0;
};

// A part of a sequence: the tokens first ... first + length - 1 of number `sequence`.
struct LengthPiece {
  size_t sequence = 0;
  int64_t first = 0, length = 0;
};

class LengthBuckets : public EpochSampler {
 public:
  // `lengths` in tokens, of every example; at least 1. Throws InvalidArgument for a length that no bucket takes,
  // and for options that are out of range or leave a batch without room for an example of each rank.
  LengthBuckets(const std::vector<int64_t>& lengths, LengthBucketsOptions options);
  LengthBuckets(const std::vector<int64_t>& lengths, LengthBucketsOptions options, const Communicator& world);

  // The most examples that a batch has on one rank: the loader's batch size must be as large. A loader with
  // drop_last(true) would drop every batch that is smaller.
  size_t largest_batch() const;
  // How many batches each rank gets in an epoch, and how many examples an epoch leaves out because they cannot
  // be shared out evenly. Both are the same in each epoch.
  size_t batches_per_epoch() const;
  size_t left_out_per_epoch() const;
  // What an index that next() returns stands for; without `split` all of that sequence.
  LengthPiece piece(size_t index) const;

  // The batches of one epoch, those of all ranks together, as indices.
  std::vector<std::vector<size_t>> batches(int64_t epoch) const;
  // Padding over all tokens of these batches, each padded to its longest example.
  double padding(int64_t epoch) const;

 private:
  struct Buckets;
  explicit LengthBuckets(std::shared_ptr<Buckets> buckets);

  std::shared_ptr<const Buckets> buckets_;
};

}  // namespace pacer
