// A data sampler that reshuffles every epoch, also inside a DataLoader, and that resumes in the middle of
// one.
//
//   pacer::EpochSampler sampler(dataset.size().value(), /*seed=*/1);
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, options);
//   session.use(sampler);
//
// A shared handle: the DataLoader's copy and the Session's are one sampler. A Session whose sampler the
// loader does not have refuses to go on, and one with Checkpoints warns where the loader's sampler is not its
// own. (A loader owns a copy of an ordinary sampler, so nobody else can tell it where to go on.) The order of
// an epoch is a pure function of seed and epoch. With a Session the position is that of the examples trained
// on, however far the loader reads ahead.
//
// With several ranks, EpochSampler(size, seed, *world), rank r of W takes examples r, r + W, r + 2 W, ... of
// that order: every rank the same number, up to W - 1 examples at the end of an epoch (others in each) are
// left out. Positions count the examples of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/data/samplers/base.h>

namespace pacer {

class Communicator;
class Hook;

namespace detail {
class EpochSamplerHook;
bool sampler_is_unseen();
}  // namespace detail

class EpochSampler : public torch::data::samplers::Sampler<> {
 public:
  // `size` examples; at least 1, and at least one for each rank.
  explicit EpochSampler(size_t size, uint64_t seed = 0);
  EpochSampler(size_t size, uint64_t seed, const Communicator& world);

  // What a DataLoader calls in begin(): the next epoch, or after a resume the rest of the one that was
  // interrupted. A size other than the sampler's is refused.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // Returns at most batch_size indices of this epoch; none when it is over.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  size_t size() const;
  uint64_t seed() const;
  int rank() const;
  int world_size() const;
  // The epoch whose examples are being trained on, from 0, and how many of them were, by all ranks: a place in
  // the epoch's order.
  int64_t epoch() const;
  int64_t examples_trained() const;

  // For the Session: counts examples trained on by this rank, and as many by each other; throws
  // InvalidArgument where these are more than next() has handed out, or it never handed out any. resume_at
  // goes on at a position: the next reset() starts there.
  void count(int64_t examples);
  void resume_at(int64_t epoch, int64_t examples);

  // LibTorch's archives: seed, epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Returns the hook that a Session uses for it.
  std::shared_ptr<Hook> hook() const;

  // The order of one epoch: a permutation of 0 ... size - 1.
  static std::vector<size_t> order(size_t size, uint64_t seed, int64_t epoch);

 protected:
  struct State;
  // For a sampler that makes other orders: see length_buckets.h.
  explicit EpochSampler(std::shared_ptr<State> state);

 private:
  friend class detail::EpochSamplerHook;
  friend bool detail::sampler_is_unseen();
  // One Session at a time.
  void enter_session();
  void leave_session();
  // The one that handed out examples to this thread last, as long as it lives.
  static std::weak_ptr<State>& last_in_this_thread();

  std::shared_ptr<State> state_;
};

}  // namespace pacer
