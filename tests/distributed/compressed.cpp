// 1-bit compression over processes, beside threads of this process on the CPU: what is compressed has the
// same bits on every back-end and device. Numbers are made by hand, so that they are equal, too.
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "scenario.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_signs.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

void expect_all(const std::vector<std::string>& messages) {
  expect(first_of(messages).empty(), "threads to take part, but ", first_of(messages));
}

Tensor numbers_of(int rank, int64_t size, int call) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(call * 64 + rank));
  return at::randn({size}, random, at::kFloat);
}

void compare_means(const std::shared_ptr<Communicator>& world, int64_t size,
                   const CompressionOptions& options) {
  CompressedAllReduce own(world, size, options);
  const Ranks ranks = Communicator::in_process(world->world_size(), world->options());
  std::vector<std::unique_ptr<CompressedAllReduce>> threads(ranks.size());
  expect_all(run_ranks(world->world_size(), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    threads[r] = std::make_unique<CompressedAllReduce>(ranks[r], size, options);
  }));
  for (int call = 0; call < 3; ++call) {
    const Tensor mean = numbers_of(world->rank(), size, call).to(world->device());
    own.reduce(mean);
    std::vector<Tensor> wanted(ranks.size());
    expect_all(run_ranks(world->world_size(), [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      wanted[r] = numbers_of(rank, size, call);
      threads[r]->reduce(wanted[r]);
    }));
    const CompressedAllReduce& same = *threads[static_cast<size_t>(world->rank())];
    const auto what = detail::concatenate(" of ", size, " elements after call ", call);
    expect(same_bits(mean.cpu(), wanted[0]), "the same mean", what);
    expect(same_bits(own.worker_error().cpu(), same.worker_error()), "the same worker error", what);
    expect(same_bits(own.server_error().cpu(), same.server_error()), "the same server error", what);
    expect(own.bytes_sent() == same.bytes_sent(), "the same bytes", what);
  }
}

void compress(const Player& player) {
  auto options = player.options();
  options.ordered_sum(true);
  const auto world = std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
  const bool by_nodes = options.ranks_per_node() > 0;
  for (const int64_t size : {1, 127, 129, 2'049, 33'000, 300'001}) {
    for (const auto norm : {ScaleNorm::rms, ScaleNorm::l1}) {
      for (const bool blocks : {false, true}) {
        compare_means(world, size,
                      CompressionOptions().scale(norm).block_scales(blocks).hierarchical(by_nodes));
      }
    }
  }
  const int64_t steps = player.number("steps");
  for (const SignsCase& c : signs_cases(by_nodes)) {
    SignsRun own(c, world, signs_sizes());
    const Ranks ranks = Communicator::in_process(world->world_size(), options);
    std::vector<std::unique_ptr<SignsRun>> threads;
    for (const auto& rank : ranks) threads.push_back(std::make_unique<SignsRun>(c, rank, signs_sizes()));
    for (int64_t step = 0; step < steps; ++step) {
      own.step(world->rank(), step);
      expect_all(run_ranks(world->world_size(),
                           [&](int rank) { threads[static_cast<size_t>(rank)]->step(rank, step); }));
      if (step % 8 != 7 && step + 1 != steps && step > 7) continue;
      const std::string difference =
          first_difference(own.state(), threads[static_cast<size_t>(world->rank())]->state());
      expect(difference.empty(), "the state of threads in the case \"", c.name, "\" after step ", step,
             ", but ", difference, " differs");
    }
    expect(own.optimizer->skipped_steps() == threads[0]->optimizer->skipped_steps(), "as many skipped steps");
  }
}

const AddScenario kCompress("compress", compress);

}  // namespace
}  // namespace pacer::testing
