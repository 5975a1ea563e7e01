// LengthBuckets by itself: what an epoch is made of, how ranks share it, and resume at every place of one.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include <pacer/core/error.h>
#include <pacer/core/philox.h>
#include <pacer/hooks/length_buckets.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::length_buckets {
namespace {

using Lengths = std::vector<int64_t>;
using Batches = std::vector<std::vector<size_t>>;
using Options = LengthBucketsOptions;

const Lengths kSmall{3, 9, 4, 16, 2, 8, 5, 1, 12, 7, 6};
const Lengths kSmallBounds{4, 8, 16};

// Log-normal, as lengths of sentences are: half of them are below the median.
Lengths sentences(size_t count, double median, double sigma, int64_t longest) {
  Lengths lengths;
  for (size_t i = 0; i < count; ++i) {
    const PhiloxCounter draw = philox4x32_10(philox_key(11), {{static_cast<uint32_t>(i), 0, 0, 0}});
    const double u = (draw.word[0] + 0.5) / 4294967296.0, v = draw.word[1] / 4294967296.0;
    const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.141592653589793 * v);
    const auto length = static_cast<int64_t>(std::lround(median * std::exp(sigma * normal)));
    lengths.push_back(std::min(longest, std::max<int64_t>(1, length)));
  }
  return lengths;
}

std::vector<size_t> flat(const Batches& batches) {
  std::vector<size_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}
std::vector<size_t> sorted(std::vector<size_t> indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}
std::vector<size_t> first_numbers(size_t count) {
  std::vector<size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  return numbers;
}

size_t bucket_of(const Lengths& bounds, int64_t length) {
  return static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), length) - bounds.begin());
}
int64_t longest_of(const Lengths& lengths, const std::vector<size_t>& batch) {
  int64_t longest = 0;
  for (const size_t index : batch) longest = std::max(longest, lengths[index]);
  return longest;
}
std::vector<size_t> buckets_of(const Lengths& lengths, const Lengths& bounds, const Batches& batches) {
  std::vector<size_t> buckets;
  for (const auto& batch : batches) buckets.push_back(bucket_of(bounds, longest_of(lengths, batch)));
  return buckets;
}

// All that a pass hands out.
Batches rest_of(LengthBuckets& sampler) {
  Batches batches;
  while (auto batch = sampler.next(sampler.largest_batch())) batches.push_back(*batch);
  return batches;
}

// The share of padding in batches of successive examples of a random order, each as large as the budget allows.
double padding_at_random(const Lengths& lengths, int64_t tokens, uint64_t seed) {
  double padded = 0, real = 0;
  int64_t count = 0, longest = 0;
  for (const size_t index : EpochSampler::order(lengths.size(), seed, 0)) {
    const int64_t with_it = std::max(longest, lengths[index]);
    if ((count + 1) * with_it > tokens) {
      padded += static_cast<double>(count * longest);
      count = longest = 0;
    }
    longest = std::max(longest, lengths[index]);
    ++count;
    real += static_cast<double>(lengths[index]);
  }
  padded += static_cast<double>(count * longest);
  return 1 - real / padded;
}

}  // namespace

TEST_CASE("the batches of an epoch are known", "[session][buckets]") {
  // From a separate program in Python.
  const auto batches = [](Options options, int64_t epoch) {
    return LengthBuckets(kSmall, options.bounds(kSmallBounds)).batches(epoch);
  };
  CHECK(batches(Options(24), 0) == Batches{{3}, {8}, {6}, {2, 0, 7, 4}, {1}, {5, 10, 9}});
  CHECK(batches(Options(24).seed(7), 2) == Batches{{1}, {5, 6, 9}, {10}, {2, 7, 0, 4}, {8}, {3}});
  CHECK(batches(Options(24).cycles(2), 0) == Batches{{6}, {3}, {8}, {2, 0, 7, 4}, {5, 10, 9}, {1}});
  CHECK(batches(Options(32).multiple(2), 0) == Batches{{5, 10, 9, 6}, {3}, {8, 1}, {2, 0, 7, 4}});
}

TEST_CASE("each example is once in an epoch, in a full batch of its bucket", "[session][buckets]") {
  const Lengths bounds{8, 16, 24, 32, 48, 64, 128};
  const auto lengths = sentences(2'000, 24, 0.6, 128);
  for (const int64_t multiple : {1, 4}) {
    for (const uint64_t seed : {0, 1}) {
      const LengthBuckets sampler(lengths, Options(1'000).bounds(bounds).multiple(multiple).seed(seed));
      std::set<Batches> epochs;
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        const auto batches = sampler.batches(epoch);
        CHECK(batches.size() == sampler.batches_per_epoch());
        CHECK(sorted(flat(batches)) == first_numbers(lengths.size()));
        std::map<size_t, size_t> mixed, not_full;  // batches, by bucket
        size_t largest = 0, below_next = 0;
        for (const auto& batch : batches) {
          std::set<size_t> buckets;
          for (const size_t index : batch) buckets.insert(bucket_of(bounds, lengths[index]));
          const size_t bucket = *buckets.rbegin();
          const auto full = [&](size_t b) {
            return static_cast<size_t>(1'000 / bounds[std::min(b, bounds.size() - 1)] / multiple * multiple);
          };
          if (buckets.size() > 1) ++mixed[bucket];
          if (batch.size() != full(bucket)) {
            ++not_full[bucket];
            CHECK(batch.size() < full(bucket));
            if (batch.size() < full(bucket + 1) || batch.size() % static_cast<size_t>(multiple) != 0)
              ++below_next;
          }
          largest = std::max(largest, batch.size());
        }
        for (const auto& [bucket, count] : mixed) CHECK(count == 1);
        for (const auto& [bucket, count] : not_full) CHECK(count == 1);
        CHECK(below_next <= 1);  // the last rest
        CHECK(largest == sampler.largest_batch());
        epochs.insert(batches);
      }
      CHECK(epochs.size() == 3);
    }
  }
}

TEST_CASE("buckets save most of the padding", "[session][buckets]") {
  // As in the table of docs/length-buckets.md.
  const auto lengths = sentences(20'000, 24, 0.6, 256);
  const double at_random = padding_at_random(lengths, 4'096, 3);
  const auto padding = [&](Options options) { return LengthBuckets(lengths, options.seed(3)).padding(0); };
  CHECK(std::lround(1000 * at_random) == 675);
  CHECK(std::lround(1000 * padding(Options(4'096))) == 38);
  CHECK(std::lround(1000 * padding(Options(4'096).bounds({32, 64, 128, 256}))) == 359);
  CHECK(std::lround(1000 * padding(Options(4'096).multiple(8))) == 39);
  // By hand: (4 + 4 + 2) of 3 x 4, 8 of 1 x 8.
  CHECK(LengthBuckets({4, 4, 2, 8}, Options(12).bounds({4, 8})).padding(0) == 2.0 / 20);
}

TEST_CASE("a curriculum goes from short to long batches in each of its parts", "[session][buckets]") {
  const Lengths bounds{8, 16, 32, 64};
  const auto lengths = sentences(500, 16, 0.7, 64);
  const auto plain = LengthBuckets(lengths, Options(128).bounds(bounds)).batches(1);
  for (const size_t cycles : {1, 3, 8}) {
    const Options options = Options(128).bounds(bounds).cycles(static_cast<int64_t>(cycles));
    const auto batches = LengthBuckets(lengths, options).batches(1);
    const auto buckets = buckets_of(lengths, bounds, batches);
    size_t steps_down = 0;
    for (size_t i = 1; i < buckets.size(); ++i) steps_down += buckets[i] < buckets[i - 1] ? 1 : 0;
    CHECK(steps_down == cycles - 1);
    for (size_t cycle = 0; cycle < cycles; ++cycle) {
      const size_t from = cycle * plain.size() / cycles, to = (cycle + 1) * plain.size() / cycles;
      const auto part = [&](const Batches& all) {
        return std::set<std::vector<size_t>>(all.begin() + static_cast<int64_t>(from),
                                             all.begin() + static_cast<int64_t>(to));
      };
      CHECK(part(batches) == part(plain));
    }
  }
}

TEST_CASE("pieces tile every sequence, and fill their batches", "[session][buckets]") {
  const Lengths bounds{4, 16, 64}, lengths{1, 3, 4, 21, 64, 199, 150, 15, 16};
  const LengthBuckets sampler(lengths, Options(128).bounds(bounds).split(true));
  std::map<size_t, int64_t> covered;
  Lengths of_pieces;
  for (size_t i = 0; i < sampler.size(); ++i) {
    const LengthPiece piece = sampler.piece(i);
    CHECK(piece.first == covered[piece.sequence]);
    covered[piece.sequence] += piece.length;
    const int64_t rest = lengths[piece.sequence] - piece.first;
    const size_t beyond = bucket_of(bounds, rest + 1);
    CHECK(piece.length == (beyond == 0 ? rest : bounds[beyond - 1]));
    of_pieces.push_back(piece.length);
  }
  for (size_t i = 0; i < lengths.size(); ++i) CHECK(covered[i] == lengths[i]);
  // 199 = 3 x 64 + 4 + 3, 150 = 2 x 64 + 16 + 4 + 2, 21 = 16 + 4 + 1, 15 = 3 x 4 + 3.
  CHECK(sampler.size() == 1 + 1 + 1 + 3 + 1 + 5 + 5 + 4 + 1);

  // Full ones have the whole budget: 32 pieces of 4, 8 of 16, 2 of 64.
  const LengthBuckets exact({128, 128, 64, 128, 16, 16, 16, 80, 64}, Options(128).bounds(bounds).split(true));
  CHECK(exact.padding(0) < 0.1);
  const LengthBuckets whole({128, 64, 64, 192}, Options(128).bounds(bounds).split(true));
  CHECK(whole.padding(0) == 0);
  for (const auto& batch : whole.batches(0)) CHECK(batch.size() <= 2);
  const LengthPiece all = LengthBuckets(lengths, Options(256)).piece(5);
  CHECK((all.sequence == 5 && all.first == 0 && all.length == 199));
}

TEST_CASE("ranks share every batch out, each as much as the others", "[session][buckets]") {
  const Lengths bounds{8, 16, 24, 32, 48, 64};
  const auto lengths = sentences(300, 20, 0.6, 64);
  for (const int ranks : {1, 2, 3, 4}) {
    const auto worlds = Communicator::in_process(ranks);
    for (const int64_t multiple : {int64_t{1}, static_cast<int64_t>(ranks)}) {
      const Options options = Options(320).bounds(bounds).multiple(multiple);
      std::vector<LengthBuckets> samplers;
      for (const auto& world : worlds) samplers.emplace_back(lengths, options, *world);
      const auto all = samplers[0].batches(0);
      const size_t world_size = worlds.size();
      size_t left_out = 0;
      std::vector<size_t> seen;
      for (const auto& batch : all) {
        const size_t share = batch.size() / world_size;
        left_out += batch.size() % world_size;
        if (share == 0) continue;
        for (size_t rank = 0; rank < world_size; ++rank) {
          const auto own = samplers[rank].next(samplers[rank].largest_batch());
          REQUIRE(own.has_value());
          REQUIRE(own->size() == share);
          for (size_t i = 0; i < share; ++i) CHECK((*own)[i] == batch[i * world_size + rank]);
          seen.insert(seen.end(), own->begin(), own->end());
        }
      }
      for (LengthBuckets& sampler : samplers) {
        CHECK_FALSE(sampler.next(100).has_value());
        CHECK(sampler.left_out_per_epoch() == left_out);
      }
      CHECK(seen.size() + left_out == lengths.size());
      CHECK(std::set<size_t>(seen.begin(), seen.end()).size() == seen.size());
      if (multiple == ranks) CHECK(left_out < world_size);
    }
  }
}

TEST_CASE("stopped at any place, each number of ranks goes on there", "[session][buckets]") {
  const Options options = Options(40).bounds(kSmallBounds).cycles(2).seed(4);
  const auto order = flat(LengthBuckets(kSmall, options).batches(2));
  for (const int before : {1, 2}) {
    for (const int after : {1, 2}) {
      const auto worlds_before = Communicator::in_process(before),
                 worlds_after = Communicator::in_process(after);
      LengthBuckets whole(kSmall, options, *worlds_before[0]);
      whole.resume_at(2, 0);
      const size_t batches = rest_of(whole).size();
      for (size_t stop = 0; stop <= batches; ++stop) {
        CAPTURE(before, after, stop);
        LengthBuckets stopped(kSmall, options, *worlds_before[0]);
        stopped.resume_at(2, 0);
        for (size_t i = 0; i < stop; ++i) {
          const auto batch = stopped.next(20);
          stopped.count(static_cast<int64_t>(batch->size()));
        }
        const int64_t position = stopped.examples_trained();
        std::vector<size_t> rest;
        for (const auto& world : worlds_after) {
          LengthBuckets resumed(kSmall, options, *world);
          resumed.resume_at(2, position);
          resumed.reset();
          CHECK(resumed.epoch() == 2);
          const auto remaining = rest_of(resumed);
          if (before == after && world->rank() == 0) CHECK(remaining == rest_of(stopped));
          for (const auto& batch : remaining) resumed.count(static_cast<int64_t>(batch.size()));
          const auto own = flat(remaining);
          rest.insert(rest.end(), own.begin(), own.end());
          resumed.reset();
          CHECK(resumed.epoch() == 3);
        }
        const std::set<size_t> ahead(order.begin() + position, order.end());
        for (const size_t index : rest) CHECK(ahead.count(index) == 1);
        CHECK(std::set<size_t>(rest.begin(), rest.end()).size() == rest.size());
        if (after == 1) CHECK(rest.size() == ahead.size());
      }
    }
  }
  // In the middle of a batch, too: what is left of it comes first.
  const LengthBuckets known(kSmall, options);
  const auto first = known.batches(2).front();
  REQUIRE(first.size() > 1);
  LengthBuckets resumed(kSmall, options);
  resumed.resume_at(2, 1);
  CHECK(resumed.next(20) == std::vector<size_t>(first.begin() + 1, first.end()));
}

TEST_CASE("small and uniform data sets have whole epochs", "[session][buckets]") {
  CHECK(LengthBuckets({5}, Options(5)).batches(0) == Batches{{0}});
  CHECK(LengthBuckets({1}, Options(1).split(true).bounds({1})).batches(9) == Batches{{0}});
  const LengthBuckets alike(Lengths(10, 6), Options(18));
  CHECK(alike.padding(3) == 0);
  CHECK(alike.batches_per_epoch() == 4);
  CHECK(sorted(flat(alike.batches(3))) == first_numbers(10));
  // A rest that is larger than the batches of the next bucket, which is not the one of the next bound.
  const LengthBuckets lonely({4, 4, 4, 64}, Options(64).bounds({4, 64, 512}));
  CHECK(lonely.batches_per_epoch() == 2);
  CHECK(lonely.largest_batch() == 3);
  // As many examples as ranks; others than rank 0's are left out in turns.
  const auto worlds = Communicator::in_process(2);
  LengthBuckets two({3, 60}, Options(128).bounds({4, 64}), *worlds[1]);
  CHECK(two.next(1)->size() == 1);
  std::set<size_t> left_out;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    left_out.insert(LengthBuckets({3, 3, 60}, Options(256).bounds({4, 64})).batches(epoch).back().back());
  }
  CHECK(left_out.size() == 3);
}

TEST_CASE("lengths and options that cannot be are refused", "[session][buckets]") {
  const auto faulty = [](const Lengths& lengths, const Options& options) {
    return refusal([&] { LengthBuckets(lengths, options); });
  };
  CHECK(contains(faulty({}, Options(8)), "at least one example"));
  CHECK(contains(faulty({4, 0}, Options(8)), "example 1 of LengthBuckets has 0 tokens"));
  CHECK(contains(faulty({-4}, Options(8)), "has -4 tokens"));
  CHECK(contains(faulty({4, 9}, Options(8).bounds({4, 8})), "has 9 tokens, but the last bound is 8"));
  CHECK(contains(faulty({4}, Options(0)), "a budget of tokens of 0"));
  CHECK(contains(faulty({4}, Options(8).multiple(0)), "a multiple of 0"));
  CHECK(contains(faulty({4}, Options(8).cycles(-1)), "a number of cycles of -1"));
  CHECK(contains(faulty({4}, Options(8).cycles(2)), "an epoch of 1 batches cannot have 2 cycles"));
  CHECK(contains(faulty({4}, Options(8).bounds({4, 4})), "bound 1 of LengthBuckets is 4"));
  CHECK(contains(faulty({4}, Options(8).bounds({0, 4})), "a bound of 0"));
  CHECK(contains(faulty({4}, Options(8).split(true)), "needs bounds"));
  CHECK(contains(faulty({4, 9}, Options(8)), "no room for 1 examples of 9; the budget must be at least 9"));
  CHECK(contains(faulty({4}, Options(12).multiple(4)), "must be at least 16"));
  CHECK(contains(faulty({int64_t{1} << 31}, Options(8)), "has 2147483648 tokens"));
  CHECK(contains(faulty({4}, Options(int64_t{1} << 31)), "to 2^31 - 1"));
  const auto worlds = Communicator::in_process(3);
  const auto for_ranks = [&](const Lengths& lengths, const Options& options) {
    return refusal([&] { LengthBuckets(lengths, options, *worlds[0]); });
  };
  CHECK(contains(for_ranks({4, 4}, Options(64)), "a LengthBuckets of 2 examples cannot serve 3 ranks"));
  CHECK(contains(for_ranks({4, 4, 30}, Options(64)), "has 2 examples of 30, which cannot serve 3 ranks"));
  LengthBuckets sampler(kSmall, Options(32));
  CHECK(sampler.largest_batch() == 4);
  CHECK(contains(refusal([&] { sampler.next(3); }), "batches of 3 examples, but its largest one has 4"));
  CHECK(sampler.epoch() == 0);
  CHECK(flat(rest_of(sampler)) == flat(sampler.batches(0)));
  CHECK(contains(refusal([&] { sampler.reset(5); }), "another data set"));
  CHECK(contains(refusal([&] { sampler.resume_at(0, 12); }),
                 "a LengthBuckets of 11 examples cannot go on after 12"));
  CHECK(contains(refusal([&] { (void)sampler.piece(11); }), "no index 11"));
  CHECK(contains(refusal([&] { (void)sampler.batches(-1); }), "no epoch -1"));
}

}  // namespace pacer::testing::length_buckets
