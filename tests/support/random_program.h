// Programs of random collectives, many under way at once, for which each rank waits in a random order of its
// own. Every result is compared, bit by bit, with what one process computes from the inputs of all ranks.
#pragma once

#include <random>
#include <string>
#include <thread>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

namespace pacer::testing {

// Plays one program on this rank. Sums of `world` must be in rank order. Throws Error that names what
// differs.
class RandomProgram {
 public:
  RandomProgram(Communicator& world, uint64_t seed) : world_(world), seed_(seed) {}

  void play(int operations) {
    std::mt19937_64 of_all(seed_), own(seed_ * 1000 + static_cast<uint64_t>(world_.rank()) + 1);
    for (int number = 0; number < operations; ++number) {
      const auto kind = of_all() % 7;
      const auto elements = static_cast<int64_t>(1 + of_all() % 50);
      start(number, static_cast<int>(kind), elements);
      while (!under_way_.empty() && own() % 3 == 0) end_one(own);
    }
    while (!under_way_.empty()) end_one(own);
  }

 private:
  struct UnderWay {
    std::string name;
    Work work;
    at::Tensor result, wanted;
    std::vector<at::Tensor> kept;
  };

  at::Tensor input_of(int rank, int number, int64_t elements) const {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(
        seed_ * 1'000'003 + static_cast<uint64_t>(number) * 101 + static_cast<uint64_t>(rank));
    return at::randn({elements}, generator, at::TensorOptions(at::kFloat));
  }

  at::Tensor sum_of(int number, int64_t elements, at::ScalarType dtype = at::kFloat) const {
    at::Tensor sum = input_of(0, number, elements).to(dtype);
    for (int rank = 1; rank < world_.world_size(); ++rank) {
      sum = sum + input_of(rank, number, elements).to(dtype);
    }
    return sum;
  }

  void start(int number, int kind, int64_t n) {
    const int rank = world_.rank(), ranks = world_.world_size();
    const auto tell = [&](const char* name, Work work, const at::Tensor& result, const at::Tensor& wanted,
                          std::vector<at::Tensor> kept = {}) {
      under_way_.push_back(
          {detail::concatenate(name, " number ", number, " of ", n, " elements, seed ", seed_),
           std::move(work), result, wanted, std::move(kept)});
    };
    const at::Tensor input = input_of(rank, number, n), output = at::empty({n});
    const at::Tensor of_all = at::empty({n * ranks});
    if (kind == 0) {
      tell("all_reduce", world_.all_reduce(input), input, sum_of(number, n));
    } else if (kind == 1) {
      const at::Tensor wide = input_of(rank, number, n * ranks);
      tell("reduce_scatter", world_.reduce_scatter(output, wide), output,
           sum_of(number, n * ranks).narrow(0, rank * n, n), {wide});
    } else if (kind == 2) {
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < ranks; ++r) inputs.push_back(input_of(r, number, n));
      tell("all_gather", world_.all_gather(of_all, input), of_all, at::cat(inputs), {input});
    } else if (kind == 3) {
      const at::Tensor wide = input_of(rank, number, n * ranks);
      std::vector<at::Tensor> chunks;
      for (int r = 0; r < ranks; ++r) chunks.push_back(input_of(r, number, n * ranks).narrow(0, rank * n, n));
      tell("all_to_all", world_.all_to_all(of_all, wide), of_all, at::cat(chunks), {wide});
    } else if (kind == 4) {
      const int root = number % ranks;
      tell("broadcast", world_.broadcast(input, root), input, input_of(root, number, n));
    } else if (kind == 5) {
      tell("all_reduce_coalesced", world_.all_reduce_coalesced({input}, at::kBFloat16), input,
           sum_of(number, n, at::kBFloat16).to(at::kFloat));
    } else if (ranks > 1) {
      const int next = (rank + 1) % ranks, former = (rank + ranks - 1) % ranks;
      tell("send_receive", world_.send_receive(input, next, output, former), output,
           input_of(former, number, n), {input});
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
    require<Error>(at::equal(operation.result, operation.wanted), "rank ", world_.rank(), ": ",
                   operation.name, " gave another result");
  }

  Communicator& world_;
  const uint64_t seed_;
  std::vector<UnderWay> under_way_;
};

}  // namespace pacer::testing
