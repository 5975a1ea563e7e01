// What the copies of an EpochSampler share: the order of the epoch that it is in, and where this rank stands in
// it. A sampler with batches of its own derives from it (length_buckets.cpp) and makes another order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pacer/core/philox.h>
#include <pacer/hooks/epoch_sampler.h>

namespace pacer {

struct EpochSampler::State {
  State(size_t size, uint64_t seed) : size(size), seed(seed) {}
  virtual ~State() = default;

  // Sets order and ends to those of `epoch`.
  virtual void arrange();
  // The class, for messages.
  virtual std::string name() const { return "EpochSampler"; }
  std::string a_name() const { return (name().front() == 'E' ? "an " : "a ") + name(); }
  // How such a sampler is made for one rank of several.
  virtual std::string call_with_ranks() const { return "EpochSampler(size, seed, *world)"; }
  // Throws where a loader that asks for so many cannot be served.
  virtual void require_batch_size(size_t /*batch_size*/) const {}
  // What besides size and seed makes the order, as a number; nothing where nothing does.
  virtual std::optional<int64_t> rules() const { return std::nullopt; }
  // The share of the epoch's padded batches that is padding, where that is known.
  virtual std::optional<double> padding() const { return std::nullopt; }

  // Throws where there are more ranks than examples.
  void set_ranks(const Communicator& world);
  // Examples of each rank between two positions in order; those that a batch leaves over belong to none.
  size_t count_between(size_t from, size_t to) const;
  // Returns the position that lies so many examples of each rank behind another.
  size_t position_after(size_t from, size_t examples) const;

  size_t size;
  uint64_t seed;
  size_t rank = 0, world_size = 1;
  int64_t epoch = -1;    // before the first reset
  int64_t trained = 0;   // a position in order: what was trained on by all ranks, or left out
  bool resumes = false;  // the next reset goes on in this epoch
  size_t next = 0;       // a position in order: where the next example of each rank stands
  std::vector<size_t> order;
  std::vector<size_t> ends;     // of the batches in order, rising; the last one is the epoch's
  size_t in_small_batches = 0;  // examples that next() has handed out in batches below the size asked for
  bool has_handed_out = false;  // since the last reset
  bool has_ever_handed_out = false;
  bool is_in_session = false;
};

namespace detail {

// Returns a permutation of 0 ... size - 1, a pure function of all of these.
std::vector<size_t> shuffled(size_t size, uint64_t seed, int64_t epoch, RandomStream stream);

}  // namespace detail
}  // namespace pacer
