// The compressed mean against the textbook's, to the bit: world sizes, sizes around every boundary of rows,
// chunks and units, scales, alignments; what it costs on the wire; and how a run goes on from stored errors.
#include <cmath>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_reference.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::compressed_mean {
namespace {

// "" or the first place where a run of the fast path and the textbook part.
std::string difference_to_textbook(int64_t world_size, int64_t size, const CompressionOptions& options,
                                   int64_t calls, const OneBitInputs& inputs) {
  const auto ranks = static_cast<size_t>(world_size);
  std::vector<std::vector<std::vector<float>>> numbers;  // [call][rank]
  for (int64_t call = 0; call < calls; ++call) {
    auto& of_call = numbers.emplace_back();
    for (int64_t rank = 0; rank < world_size; ++rank) of_call.push_back(inputs(rank, call));
  }
  const auto run = run_onebit(Communicator::in_process(static_cast<int>(world_size)), size, options, 0, calls,
                              [&](int64_t rank, int64_t call) {
                                return numbers[static_cast<size_t>(call)][static_cast<size_t>(rank)];
                              });
  if (!first_of(run.messages).empty()) return first_of(run.messages);
  OneBitTextbook<float> textbook(rules_for(world_size, size, options));
  for (size_t call = 0; call < numbers.size(); ++call) {
    const std::vector<float> mean = textbook.reduce(numbers[call]);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (!has_bits_of(run.means[rank][call], mean)) {
        return "the mean of call " + std::to_string(call) + " on rank " + std::to_string(rank);
      }
    }
  }
  int64_t served_until = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (!has_bits_of(run.worker_errors[rank], textbook.worker_errors[rank])) {
      return "the worker's error on rank " + std::to_string(rank);
    }
    const auto [begin, end] = run.served[rank];
    if (begin != served_until || end != std::min(size, begin + textbook.chunk()) ||
        run.server_errors[rank].numel() != end - begin) {
      return "the range that rank " + std::to_string(rank) + " serves";
    }
    if (!has_bits_of(run.server_errors[rank], textbook.server_error, begin)) {
      return "the server's error on rank " + std::to_string(rank);
    }
    served_until = end;
  }
  return served_until == size ? "" : "the end of what is served";
}

std::string text_of(const CompressionOptions& options) {
  return std::string(options.scale() == ScaleNorm::rms ? "rms" : "l1") +
         (options.block_scales() ? " by blocks" : "") + ", alignment " +
         std::to_string(options.alignment().value_or(0));
}

std::vector<CompressionOptions> all_scales() {
  std::vector<CompressionOptions> all;
  for (const auto norm : {ScaleNorm::rms, ScaleNorm::l1}) {
    for (const bool blocks : {false, true}) {
      all.push_back(CompressionOptions().scale(norm).block_scales(blocks).compress_alone(true));
    }
  }
  return all;
}

}  // namespace

TEST_CASE("the compressed mean is the textbook's, to the bit, on every rank", "[collectives][onebit]") {
  uint64_t seed = 0;
  for (const bool blocks : {false, true}) {
    for (const int64_t world_size : {1, 2, 3, 4, 7, 8}) {
      for (const int64_t size : {1,    2,    7,    8,    9,    63,   127,  128,  129,  255,  257,
                                 1000, 1023, 1025, 2047, 2048, 2049, 2175, 2177, 4095, 4096, 4097}) {
        const auto norm = ++seed % 2 == 0 ? ScaleNorm::rms : ScaleNorm::l1;
        const auto options = CompressionOptions().scale(norm).block_scales(blocks).compress_alone(true);
        INFO(text_of(options) << ", " << world_size << " ranks, " << size << " elements");
        REQUIRE(difference_to_textbook(world_size, size, options, 10, random_inputs(seed, size)) == "");
      }
    }
  }
}

TEST_CASE("errors carried for many calls stay the textbook's", "[collectives][onebit]") {
  uint64_t seed = 500;
  for (const CompressionOptions& options : all_scales()) {
    for (const int64_t world_size : {1, 3, 8}) {
      for (const int64_t size : {129, 4097}) {
        INFO(text_of(options) << ", " << world_size << " ranks, " << size << " elements");
        REQUIRE(difference_to_textbook(world_size, size, options, 40, random_inputs(++seed, size)) == "");
      }
    }
  }
}

TEST_CASE("chunks of a larger alignment give the textbook's mean too", "[collectives][onebit]") {
  uint64_t seed = 1000;
  for (const bool blocks : {false, true}) {
    for (const int64_t alignment : {384, 2048, 4096, 6144}) {
      if (blocks && alignment % 2048 != 0) continue;
      const auto options = CompressionOptions().alignment(alignment).block_scales(blocks);
      for (const int64_t size : {1, 2049, 12289}) {
        for (const int64_t world_size : {2, 3, 8}) {
          INFO(text_of(options) << ", " << world_size << " ranks, " << size << " elements");
          REQUIRE(difference_to_textbook(world_size, size, options, 5, random_inputs(++seed, size)) == "");
        }
      }
    }
  }
}

TEST_CASE("sums over several units are the textbook's", "[collectives][onebit]") {
  for (const CompressionOptions& options : all_scales()) {
    for (const int64_t size : {32767, 32769, 70001}) {
      INFO(text_of(options) << ", " << size << " elements");
      REQUIRE(difference_to_textbook(2, size, options, 4, random_inputs(3, size)) == "");
    }
  }
  const auto whole = CompressionOptions();
  REQUIRE(difference_to_textbook(4, 1000003, whole, 3, random_inputs(3, 1000003)) == "");
}

TEST_CASE("a single rank keeps its numbers unless it is told to compress alone", "[collectives][onebit]") {
  CompressedAllReduce mean(Communicator::in_process(1)[0], 3);
  const at::Tensor buffer = tensor_of({1.5F, -2, NAN}), before = buffer.clone();
  mean.reduce(buffer);
  CHECK(same_bits(buffer, before));
  CHECK(same_bits(mean.worker_error(), at::zeros({3})));
  CHECK(same_bits(mean.server_error(), at::zeros({3})));
  CHECK(mean.bytes_sent() == 0);
}

TEST_CASE("a mean of no elements is no work for anyone", "[collectives][onebit]") {
  const auto world = Communicator::in_process(3);
  const auto run = run_onebit(world, 0, {}, 0, 5, random_inputs(1, 0));
  CHECK(first_of(run.messages) == "");
  CHECK(run.worker_errors[2].numel() == 0);
  CHECK(world[0]->traffic().size() == 1);  // the comparison of sizes and options
}

TEST_CASE("P1: inputs that need no rounding come through exactly", "[collectives][onebit]") {
  // Ranks agree in sign and are powers of two apart, so that every square, sum, mean and root is an fp32
  // number.
  for (const CompressionOptions& options : all_scales()) {
    for (const int64_t world_size : {1, 2, 4}) {
      for (const int64_t size : {1, 100, 2048, 5000, 40000}) {
        const auto signs = random_inputs(3, size);
        const auto run = run_onebit(Communicator::in_process(static_cast<int>(world_size)), size, options, 0,
                                    12, [&](int64_t rank, int64_t call) {
                                      auto values = signs(0, call);
                                      for (float& value : values)
                                        value = std::copysign(
                                            std::ldexp(1.0F, static_cast<int>(rank + 5 * (call - 6))), value);
                                      return values;
                                    });
        INFO(text_of(options) << ", " << world_size << " ranks, " << size << " elements");
        REQUIRE(first_of(run.messages) == "");
        // 2^0 + 2^1 + ... over the number of ranks.
        const float sum = static_cast<float>((1 << world_size) - 1) / static_cast<float>(world_size);
        for (size_t call = 0; call < 12; ++call) {
          auto expected = signs(0, static_cast<int64_t>(call));
          for (float& value : expected)
            value = std::copysign(std::ldexp(sum, 5 * (static_cast<int>(call) - 6)), value);
          for (const auto& means : run.means) REQUIRE(has_bits_of(means[call], expected));
        }
        for (const auto& error : run.worker_errors) REQUIRE(same_bits(error, at::zeros_like(error)));
        for (const auto& error : run.server_errors) REQUIRE(same_bits(error, at::zeros_like(error)));
      }
    }
  }
}

TEST_CASE("zeros of either sign are means of exact zeros", "[collectives][onebit]") {
  for (const CompressionOptions& options : all_scales()) {
    const auto run = run_onebit(Communicator::in_process(3), 300, options, 0, 3, [](int64_t rank, int64_t) {
      return std::vector<float>(300, rank == 1 ? 0.0F : -0.0F);
    });
    REQUIRE(first_of(run.messages) == "");
    for (const auto& mean : run.means[0]) REQUIRE(same_bits(mean, at::zeros({300})));
  }
}

TEST_CASE("a run goes on from stored errors to the bit", "[collectives][onebit]") {
  for (const CompressionOptions& options : all_scales()) {
    for (const int64_t world_size : {1, 2, 3}) {
      for (const int64_t size : {1, 130, 5000}) {
        INFO(text_of(options) << ", " << world_size << " ranks, " << size << " elements");
        const auto inputs = random_inputs(9, size);
        const auto world = Communicator::in_process(static_cast<int>(world_size));
        const auto whole = run_onebit(world, size, options, 0, 14, inputs);
        auto stored = run_onebit(world, size, options, 0, 7, inputs);
        const auto rest =
            run_onebit(world, size, options, 7, 14, inputs, [&](CompressedAllReduce& mean, size_t rank) {
              at::Tensor &worker = stored.worker_errors[rank], &server = stored.server_errors[rank];
              mean.set_errors(worker, server);
              // What is read is what was set, and neither is the object's own memory.
              require<Error>(same_bits(mean.worker_error(), worker) && same_bits(mean.server_error(), server),
                             "other errors are read than were set");
              worker.fill_(5);
              server.fill_(5);
              mean.worker_error().fill_(7);
              mean.server_error().fill_(7);
            });
        REQUIRE(first_of(whole.messages) + first_of(stored.messages) + first_of(rest.messages) == "");
        for (size_t rank = 0; rank < world.size(); ++rank) {
          for (size_t call = 0; call < 7; ++call) {
            REQUIRE(same_bits(rest.means[rank][call], whole.means[rank][call + 7]));
          }
          REQUIRE(same_bits(rest.worker_errors[rank], whole.worker_errors[rank]));
          REQUIRE(same_bits(rest.server_errors[rank], whole.server_errors[rank]));
        }
      }
    }
  }
}

TEST_CASE("A3: a call sends a thirtieth of what an fp32 ring sends, in two collectives",
          "[collectives][onebit]") {
  // Ranks of one host, or a host each.
  for (const auto& [world_size, ranks_per_node] : {std::pair{2, 2}, {4, 4}, {8, 8}, {2, 1}, {4, 1}, {8, 2}}) {
    for (const int64_t size : {100000, 123457, 500000}) {
      constexpr int64_t kCalls = 3;
      const auto world =
          Communicator::in_process(world_size, CommunicatorOptions().ranks_per_node(ranks_per_node));
      std::vector<int64_t> counted(world.size()), before(world.size());
      const auto messages = run_ranks(world_size, [&](int rank) {
        const auto own = static_cast<size_t>(rank);
        CompressedAllReduce mean(world[own], size);
        before[own] = world[own]->bytes_sent();
        world[own]->set_phase("compressed");
        for (int64_t call = 0; call < kCalls; ++call) mean.reduce(at::full({size}, call - 1.5F * rank));
        counted[own] = mean.bytes_sent();
      });
      INFO(world_size << " ranks, " << size << " elements");
      REQUIRE(first_of(messages) == "");
      const double ring =
          2.0 * static_cast<double>((world_size - 1) * size * 4) / static_cast<double>(world_size);
      for (size_t rank = 0; rank < world.size(); ++rank) {
        CHECK(static_cast<double>(counted[rank]) <= kCalls * ring / 30);
        CHECK(world[rank]->bytes_sent() - before[rank] == counted[rank]);
        std::vector<std::string> operations;
        for (const Traffic& entry : world[rank]->traffic()) {
          if (entry.phase != "compressed") continue;
          operations.push_back(entry.operation);
          CHECK(entry.calls == kCalls);
          CHECK(2 * entry.bytes_sent == counted[rank]);
        }
        CHECK(operations == std::vector<std::string>{"all_to_all", "all_gather"});
        // Two times a header and the signs of a chunk, for each other rank.
        const int64_t chunk = OneBitTextbook<float>(rules_for(world_size, size, {})).chunk();
        CHECK(counted[rank] == kCalls * 2 * (world_size - 1) * (16 + chunk / 8));
      }
    }
  }
}

}  // namespace pacer::testing::compressed_mean
