// Programs of random collectives on the ranks of a world, on groups, groups of groups and lanes, many under
// way at once, for which each rank waits in a random order of its own. Every result is compared, bit by bit,
// with what one process computes from the inputs of all ranks.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

namespace pacer::testing {

// Plays programs on this rank, which may follow one another and share their groups. Sums of `world` must be
// in rank order. Throws Error that names what differs.
class RandomPrograms {
 public:
  explicit RandomPrograms(std::shared_ptr<Communicator> world)
      : rank_(world->rank()), ranks_(world->world_size()), device_(world->device()) {
    communicators_.push_back(std::move(world));
  }

  // `before`: called before each operation, with its number.
  template <class F>
  void play(uint64_t seed, int operations, const F& before) {
    seed_ = seed;
    std::mt19937_64 of_all(seed), own(seed * 1000 + static_cast<uint64_t>(rank_) + 1);
    for (int number = 0; number < operations; ++number) {
      before(number);
      const auto which = of_all() % communicators_.size();
      if (communicators_.size() < kMost && of_all() % 4 == 0) {
        split(which, of_all);
        continue;
      }
      const auto kind = of_all() % 8;
      const auto elements = static_cast<int64_t>(1 + of_all() % 50);
      if (communicators_[which] != nullptr) {
        start(*communicators_[which], number, static_cast<int>(kind), elements);
      }
      while (!under_way_.empty() && own() % 3 == 0) end_one(own);
    }
    while (!under_way_.empty()) end_one(own);
  }
  void play(uint64_t seed, int operations) {
    play(seed, operations, [](int) {});
  }

 private:
  static constexpr size_t kMost = 6;  // communicators

  struct UnderWay {
    std::string name;
    Work work;
    at::Tensor result, wanted;
    std::vector<at::Tensor> kept;
  };

  // A lane, or a group for each of up to three colors; null where this rank is in none.
  void split(size_t parent, std::mt19937_64& of_all) {
    const bool is_lane = of_all() % 3 == 0;
    int color = -1, key = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      const int colored = static_cast<int>(of_all() % 7) - 1, keyed = static_cast<int>(of_all() % 5);
      if (rank != rank_) continue;
      color = colored < 0 ? -1 : colored % 3;
      key = keyed;
    }
    std::shared_ptr<Communicator> made;
    if (const auto& from = communicators_[parent]) {
      made = is_lane ? from->lane(std::to_string(communicators_.size())) : from->split(color, key);
    }
    communicators_.push_back(std::move(made));
  }

  at::Tensor input_of(int rank, int number, int64_t elements) const {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(
        seed_ * 1'000'003 + static_cast<uint64_t>(number) * 101 + static_cast<uint64_t>(rank));
    return at::randn({elements}, generator, at::TensorOptions(at::kFloat));
  }

  void start(Communicator& group, int number, int kind, int64_t n) {
    const int rank = group.rank(), ranks = group.world_size();
    const auto input_at = [&](int r, int64_t elements) {
      return input_of(group.rank_in_world(r), number, elements);
    };
    const auto sum = [&](int64_t elements, at::ScalarType dtype) {
      at::Tensor result = input_at(0, elements).to(dtype);
      for (int r = 1; r < ranks; ++r) result = result + input_at(r, elements).to(dtype);
      return result;
    };
    const auto tell = [&](const char* name, Work work, const at::Tensor& result, const at::Tensor& wanted,
                          std::vector<at::Tensor> kept = {}) {
      under_way_.push_back({detail::concatenate(name, " number ", number, " of ", n, " elements on ", ranks,
                                                " ranks (", group.name(), "), seed ", seed_),
                            std::move(work), result, wanted, std::move(kept)});
    };
    const at::TensorOptions here = at::TensorOptions(at::kFloat).device(device_);
    const at::Tensor input = input_at(rank, n).to(device_), output = at::empty({n}, here);
    const at::Tensor wide = input_at(rank, n * ranks).to(device_), of_all = at::empty({n * ranks}, here);
    std::vector<at::Tensor> inputs, chunks;
    for (int r = 0; r < ranks; ++r) {
      inputs.push_back(input_at(r, n));
      chunks.push_back(input_at(r, n * ranks).narrow(0, rank * n, n));
    }
    if (kind == 0) {
      tell("all_reduce", group.all_reduce(input), input, sum(n, at::kFloat));
    } else if (kind == 1) {
      tell("reduce_scatter", group.reduce_scatter(output, wide), output,
           sum(n * ranks, at::kFloat).narrow(0, rank * n, n), {wide});
    } else if (kind == 2) {
      tell("all_gather", group.all_gather(of_all, input), of_all, at::cat(inputs), {input});
    } else if (kind == 3) {
      tell("all_to_all", group.all_to_all(of_all, wide), of_all, at::cat(chunks), {wide});
    } else if (kind == 4) {
      const int root = number % ranks;
      tell("broadcast", group.broadcast(input, root), input, input_at(root, n));
    } else if (kind == 5) {
      tell("all_reduce_coalesced", group.all_reduce_coalesced({input}, at::kBFloat16), input,
           sum(n, at::kBFloat16).to(at::kFloat));
    } else if (kind == 6) {
      const at::Tensor own = of_all.narrow(0, rank * n, n);  // the input where it belongs in the output
      own.copy_(input);
      tell("all_gather in place", group.all_gather(of_all, own), of_all, at::cat(inputs));
    } else if (ranks > 1) {
      const int next = (rank + 1) % ranks, former = (rank + ranks - 1) % ranks;
      tell("send_receive", group.send_receive({Message::send(input, next), Message::receive(output, former)}),
           output, input_at(former, n), {input});
    }
  }

  void end_one(std::mt19937_64& random) {
    const size_t which = random() % under_way_.size();
    UnderWay operation = std::move(under_way_[which]);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(which));
    if (random() % 2 == 0) {
      while (!operation.work.is_done()) std::this_thread::yield();
    }
    operation.work.wait();
    require<Error>(at::equal(operation.result.cpu(), operation.wanted), "rank ", rank_, ": ", operation.name,
                   " gave another result");
  }

  uint64_t seed_ = 0;
  const int rank_, ranks_;
  const at::Device device_;
  std::vector<std::shared_ptr<Communicator>> communicators_;  // the world first; null: this rank is not in it
  std::vector<UnderWay> under_way_;
};

}  // namespace pacer::testing
