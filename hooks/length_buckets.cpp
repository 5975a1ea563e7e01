#include <pacer/hooks/length_buckets.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/detail/sampler_state.h>

namespace pacer {
namespace {

// 8, 9, ..., 16, 18, ..., 32, 36, ... below the longest, and then that.
std::vector<int64_t> default_bounds(int64_t longest) {
  constexpr int64_t kSteps = 8;
  std::vector<int64_t> bounds;
  for (int64_t power = kSteps; power < longest; power *= 2) {
    for (int64_t bound = power; bound < std::min(2 * power, longest); bound += power / kSteps) {
      bounds.push_back(bound);
    }
  }
  bounds.push_back(longest);
  return bounds;
}

// Products of two of these numbers are numbers, too.
constexpr int64_t kTooMany = int64_t{1} << 31;

void check_lengths(const std::vector<int64_t>& lengths, const LengthBucketsOptions& options) {
  const auto check = [](const char* what, int64_t value, int64_t least) {
    require(value >= least && value < kTooMany, "LengthBuckets cannot have ", what, " of ", value,
            "; it takes from ", least, " to 2^31 - 1");
  };
  require(!lengths.empty(), "LengthBuckets needs at least one example");
  check("a budget of tokens", options.tokens(), 1);
  check("a multiple", options.multiple(), 1);
  check("a number of cycles", options.cycles(), 0);
  const std::vector<int64_t>& bounds = options.bounds();
  require(!options.split() || !bounds.empty(),
          "LengthBuckets with split(true) needs bounds, which are the lengths of the pieces");
  for (size_t i = 0; i < bounds.size(); ++i) {
    check("a bound", bounds[i], 1);
    require(i == 0 || bounds[i] > bounds[i - 1], "bound ", i, " of LengthBuckets is ", bounds[i],
            ", but the one before is ", bounds[std::max<size_t>(i, 1) - 1], "; bounds must rise");
  }
  const int64_t longest = options.split() ? INT64_MAX : bounds.empty() ? kTooMany - 1 : bounds.back();
  for (size_t i = 0; i < lengths.size(); ++i) {
    require(lengths[i] >= 1, "example ", i, " of LengthBuckets has ", lengths[i],
            " tokens; leave out those without any");
    require(lengths[i] <= longest, "example ", i, " of LengthBuckets has ", lengths[i],
            " tokens, but the last bound is ", longest, "; add a longer bound, cut it, or use split(true)");
  }
}

// The largest bound first, then the largest that the rest still fills, and last what fills none.
std::vector<LengthPiece> pieces_of(const std::vector<int64_t>& lengths, const std::vector<int64_t>& bounds) {
  std::vector<LengthPiece> pieces;
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int64_t first = 0; first < lengths[i];) {
      const auto longer = std::upper_bound(bounds.begin(), bounds.end(), lengths[i] - first);
      const int64_t length = longer == bounds.begin() ? lengths[i] - first : *(longer - 1);
      pieces.push_back({i, first, length});
      first += length;
    }
  }
  return pieces;
}

// A batch on its way: places in the shuffled order of all examples, and the bucket that it was cut from.
struct LengthBatch {
  size_t bucket;
  std::vector<size_t> places;
};

}  // namespace

struct LengthBuckets::Buckets : EpochSampler::State {
  Buckets(const std::vector<int64_t>& lengths, const LengthBucketsOptions& options);

  void arrange() override;
  std::string name() const override { return "LengthBuckets"; }
  std::string call_with_ranks() const override { return "LengthBuckets(lengths, options, *world)"; }
  void require_batch_size(size_t batch_size) const override;
  std::optional<int64_t> rules() const override { return checksum; }
  std::optional<double> padding() const override { return padding_of_epoch; }

  // Checks that each rank gets an example of every full batch, and counts what an epoch has.
  void plan();
  // How many of the examples that wait in a bucket make its next batch; 0: they go to the next longer bucket.
  size_t next_batch(size_t bucket, size_t waiting) const;
  std::vector<std::vector<size_t>> make_batches(int64_t of_epoch) const;
  double padding_of(const std::vector<std::vector<size_t>>& batches) const;

  LengthBucketsOptions options;
  std::vector<LengthPiece> pieces;  // only with split
  std::vector<int64_t> lengths;     // by index
  std::vector<int64_t> bounds;      // of buckets that have examples
  std::vector<size_t> full_batch;   // examples, by bucket
  std::vector<uint32_t> bucket_of;  // by index
  size_t batch_count = 0, rank_batches = 0, largest = 0, left_out = 0;
  int64_t checksum = 0;
  std::optional<double> padding_of_epoch;  // once there was a reset
};

LengthBuckets::Buckets::Buckets(const std::vector<int64_t>& all, const LengthBucketsOptions& from)
    : State(all.size(), from.seed()), options(from), lengths(all) {
  check_lengths(all, from);
  if (options.split()) {
    pieces = pieces_of(all, options.bounds());
    lengths.clear();
    for (const LengthPiece& each : pieces) lengths.push_back(each.length);
    size = lengths.size();
  }
  bounds = options.bounds();
  if (bounds.empty()) bounds = default_bounds(*std::max_element(lengths.begin(), lengths.end()));
  const auto first_of_at_least = [this](int64_t length) {
    return static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), length) - bounds.begin());
  };
  std::vector<bool> is_used(bounds.size());
  for (const int64_t length : lengths) is_used[first_of_at_least(length)] = true;
  size_t kept = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    if (is_used[i]) bounds[kept++] = bounds[i];
  }
  bounds.resize(kept);
  for (const int64_t length : lengths) bucket_of.push_back(static_cast<uint32_t>(first_of_at_least(length)));
  for (const int64_t bound : bounds) {
    const int64_t fits = options.tokens() / bound / options.multiple() * options.multiple();
    require(fits > 0, "LengthBuckets: a batch of ", options.tokens(), " tokens has no room for ",
            options.multiple(), " examples of ", bound, "; the budget must be at least ",
            options.multiple() * bound, " tokens");
    full_batch.push_back(static_cast<size_t>(fits));
  }

  Checksum sum;
  const auto add = [&sum](const std::vector<int64_t>& numbers) {
    const auto count = static_cast<int64_t>(numbers.size());
    sum.add(&count, sizeof(count)).add(numbers.data(), numbers.size() * sizeof(int64_t));
  };
  add(all);
  add(bounds);
  add({options.tokens(), options.multiple(), options.cycles(), options.split() ? 1 : 0});
  checksum = static_cast<int64_t>(std::stoull(sum.hex().substr(0, 15), nullptr, 16));
}

void LengthBuckets::Buckets::plan() {
  std::vector<size_t> counts(bounds.size());
  for (const uint32_t bucket : bucket_of) ++counts[bucket];
  const auto count_batch = [this](size_t count) {
    largest = std::max(largest, count);
    ++batch_count;
    rank_batches += count >= world_size ? 1 : 0;
    left_out += count % world_size;
  };
  size_t rest = 0;
  for (size_t b = 0; b < bounds.size(); ++b) {
    require(full_batch[b] >= world_size, "LengthBuckets: a batch of ", options.tokens(), " tokens has ",
            full_batch[b], " examples of ", bounds[b], ", which cannot serve ", world_size,
            " ranks; the budget must be at least ", static_cast<int64_t>(world_size) * bounds[b], " tokens");
    rest += counts[b];
    while (const size_t count = next_batch(b, rest)) {
      count_batch(count);
      rest -= count;
    }
  }
  require(options.cycles() <= static_cast<int64_t>(batch_count), "LengthBuckets: an epoch of ", batch_count,
          " batches cannot have ", options.cycles(), " cycles");
}

// A rest that is as large as the batches of the next bucket is not worth the padding that it would have there.
size_t LengthBuckets::Buckets::next_batch(size_t bucket, size_t waiting) const {
  if (waiting >= full_batch[bucket]) return full_batch[bucket];
  if (bucket + 1 == bounds.size()) return waiting;
  if (waiting < full_batch[bucket + 1]) return 0;
  const auto multiple = static_cast<size_t>(options.multiple());
  return waiting / multiple * multiple;
}

std::vector<std::vector<size_t>> LengthBuckets::Buckets::make_batches(int64_t of_epoch) const {
  const auto examples = detail::shuffled(size, seed, of_epoch, RandomStream::epoch_order);
  std::vector<std::vector<size_t>> places(bounds.size());
  for (size_t place = 0; place < size; ++place) places[bucket_of[examples[place]]].push_back(place);

  std::vector<LengthBatch> cut;
  std::vector<size_t> rest;
  for (size_t b = 0; b < bounds.size(); ++b) {
    rest.insert(rest.end(), places[b].begin(), places[b].end());
    auto from = rest.cbegin();
    while (const size_t count = next_batch(b, static_cast<size_t>(rest.cend() - from))) {
      cut.push_back({b, {from, from + static_cast<std::ptrdiff_t>(count)}});
      // Ranks leave the last ones of a batch out, which should not always be those of the longer bucket.
      std::sort(cut.back().places.begin(), cut.back().places.end());
      from += static_cast<std::ptrdiff_t>(count);
    }
    rest.erase(rest.cbegin(), from);
  }

  auto turns = detail::shuffled(cut.size(), seed, of_epoch, RandomStream::batch_order);
  const auto cycles = static_cast<size_t>(options.cycles());
  const auto start_of = [&](size_t cycle) {
    return turns.begin() + static_cast<std::ptrdiff_t>(cycle * cut.size() / cycles);
  };
  for (size_t cycle = 0; cycle < cycles; ++cycle) {
    std::stable_sort(start_of(cycle), start_of(cycle + 1),
                     [&cut](size_t a, size_t b) { return cut[a].bucket < cut[b].bucket; });
  }
  std::vector<std::vector<size_t>> batches;
  for (const size_t turn : turns) {
    batches.emplace_back();
    for (const size_t place : cut[turn].places) batches.back().push_back(examples[place]);
  }
  return batches;
}

double LengthBuckets::Buckets::padding_of(const std::vector<std::vector<size_t>>& batches) const {
  double padded = 0, real = 0;
  for (const auto& batch : batches) {
    int64_t longest = 0;
    for (const size_t index : batch) {
      longest = std::max(longest, lengths[index]);
      real += static_cast<double>(lengths[index]);
    }
    padded += static_cast<double>(longest) * static_cast<double>(batch.size());
  }
  return (padded - real) / padded;
}

void LengthBuckets::Buckets::arrange() {
  const auto batches = make_batches(epoch);
  order.clear();
  ends.clear();
  for (const auto& batch : batches) {
    order.insert(order.end(), batch.begin(), batch.end());
    ends.push_back(order.size());
  }
  padding_of_epoch = padding_of(batches);
}

void LengthBuckets::Buckets::require_batch_size(size_t batch_size) const {
  require(batch_size >= largest / world_size, "the loader asks LengthBuckets for batches of ", batch_size,
          " examples, but its largest one has ", largest / world_size,
          " on each rank; give the loader the batch size sampler.largest_batch()");
}

LengthBuckets::LengthBuckets(std::shared_ptr<Buckets> buckets)
    : EpochSampler(buckets), buckets_(std::move(buckets)) {}

LengthBuckets::LengthBuckets(const std::vector<int64_t>& lengths, LengthBucketsOptions options)
    : LengthBuckets([&] {
        auto buckets = std::make_shared<Buckets>(lengths, options);
        buckets->plan();
        return buckets;
      }()) {}

LengthBuckets::LengthBuckets(const std::vector<int64_t>& lengths, LengthBucketsOptions options,
                             const Communicator& world)
    : LengthBuckets([&] {
        auto buckets = std::make_shared<Buckets>(lengths, options);
        buckets->set_ranks(world);
        buckets->plan();
        return buckets;
      }()) {}

size_t LengthBuckets::largest_batch() const { return buckets_->largest / buckets_->world_size; }
size_t LengthBuckets::batches_per_epoch() const { return buckets_->rank_batches; }
size_t LengthBuckets::left_out_per_epoch() const { return buckets_->left_out; }

LengthPiece LengthBuckets::piece(size_t index) const {
  require(index < buckets_->size, "LengthBuckets of ", buckets_->size, " examples have no index ", index);
  if (buckets_->options.split()) return buckets_->pieces[index];
  return {index, 0, buckets_->lengths[index]};
}

std::vector<std::vector<size_t>> LengthBuckets::batches(int64_t epoch) const {
  require(epoch >= 0, "LengthBuckets have no epoch ", epoch);
  return buckets_->make_batches(epoch);
}

double LengthBuckets::padding(int64_t epoch) const { return buckets_->padding_of(batches(epoch)); }

}  // namespace pacer
