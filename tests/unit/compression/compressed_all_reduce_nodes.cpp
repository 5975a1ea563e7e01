// The compressed mean with nodes as workers: the bits of the flat one between ranks that bring their node's
// mean, for half the bytes between nodes, or less.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_reference.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::compressed_nodes {
namespace {

Ranks nodes_of(int64_t nodes, int64_t ranks_per_node) {
  return Communicator::in_process(static_cast<int>(nodes * ranks_per_node),
                                  CommunicatorOptions().ranks_per_node(static_cast<int>(ranks_per_node)));
}

// ((x0 + x1) + ...) / n in fp32.
OneBitInputs means_of_nodes(const OneBitInputs& inputs, int64_t ranks_per_node) {
  return [=](int64_t node, int64_t call) {
    std::vector<float> mean = inputs(node * ranks_per_node, call);
    for (int64_t i = 1; i < ranks_per_node; ++i) {
      const std::vector<float> other = inputs(node * ranks_per_node + i, call);
      for (size_t k = 0; k < mean.size(); ++k) mean[k] = mean[k] + other[k];
    }
    for (float& value : mean) value = value * static_cast<float>(1.0 / static_cast<double>(ranks_per_node));
    return mean;
  };
}

int64_t bytes_between_nodes(const Communicator& world, const CompressionOptions& options) {
  int64_t bytes = 0;
  for (const Traffic& traffic : world.traffic()) {
    if (traffic.operation != "all_to_all" && traffic.operation != "all_gather") continue;
    if (traffic.group == (options.hierarchical() ? "between nodes" : "")) bytes += traffic.bytes_sent;
  }
  return bytes;
}

}  // namespace

TEST_CASE("with nodes as workers the mean is the textbook's of the nodes' means, to the bit",
          "[collectives][onebit][nodes]") {
  uint64_t seed = 2000;
  for (const bool blocks : {false, true}) {
    for (const auto& [nodes, per_node] : {std::pair{1, 2}, {2, 1}, {2, 2}, {2, 3}, {3, 2}, {2, 4}, {4, 2}}) {
      for (const int64_t size : {1, 129, 2049, 12289, 40001}) {
        const auto norm = ++seed % 2 == 0 ? ScaleNorm::rms : ScaleNorm::l1;
        const auto options = CompressionOptions().scale(norm).block_scales(blocks).compress_alone(true);
        INFO(nodes << " nodes of " << per_node << ", " << size << " elements, by blocks: " << blocks);
        const OneBitInputs inputs = random_inputs(seed, size), joined = means_of_nodes(inputs, per_node);
        const auto run = run_onebit(nodes_of(nodes, per_node), size,
                                    CompressionOptions(options).hierarchical(true), 0, 5, inputs);
        REQUIRE(first_of(run.messages) == "");
        OneBitTextbook<float> textbook(rules_for(nodes, size, options));
        for (size_t call = 0; call < 5; ++call) {
          std::vector<std::vector<float>> of_nodes;
          for (int64_t node = 0; node < nodes; ++node) {
            of_nodes.push_back(joined(node, static_cast<int64_t>(call)));
          }
          const std::vector<float> mean = textbook.reduce(of_nodes);
          for (const auto& of_rank : run.means) REQUIRE(has_bits_of(of_rank[call], mean));
        }
        for (size_t rank = 0; rank < run.means.size(); ++rank) {
          const size_t node = rank / static_cast<size_t>(per_node);
          const auto [begin, end] = run.served[rank];
          REQUIRE(begin == std::min<int64_t>(size, static_cast<int64_t>(node) * textbook.chunk()));
          REQUIRE(run.server_errors[rank].numel() == end - begin);
          REQUIRE(has_bits_of(run.worker_errors[rank], textbook.worker_errors[node]));
          REQUIRE(has_bits_of(run.server_errors[rank], textbook.server_error, begin));
        }
      }
    }
  }
}

TEST_CASE("a single node takes the plain mean", "[collectives][onebit][nodes]") {
  const OneBitInputs inputs = random_inputs(3000, 500);
  const auto run = run_onebit(nodes_of(1, 3), 500, CompressionOptions().hierarchical(true), 0, 2, inputs);
  REQUIRE(first_of(run.messages) == "");
  for (size_t rank = 0; rank < 3; ++rank) {
    for (int64_t call = 0; call < 2; ++call) {
      CHECK(has_bits_of(run.means[rank][static_cast<size_t>(call)], means_of_nodes(inputs, 3)(0, call)));
    }
    CHECK(run.worker_errors[rank].abs().sum().item<float>() == 0);
  }
}

TEST_CASE("nodes as workers send half the bytes between two nodes of two", "[collectives][onebit][nodes]") {
  constexpr int64_t kSize = 1'000'000;
  const OneBitInputs inputs = random_inputs(3001, kSize);
  const auto sent = [&](bool hierarchical) {
    const Ranks ranks = nodes_of(2, 2);
    const auto options = CompressionOptions().hierarchical(hierarchical);
    REQUIRE(first_of(run_onebit(ranks, kSize, options, 0, 1, inputs).messages) == "");
    int64_t bytes = 0;
    for (const auto& rank : ranks) bytes += bytes_between_nodes(*rank, options);
    return static_cast<double>(bytes);
  };
  // Flat, each rank sends a third of its signs to the other rank of its node.
  const double flat = sent(false) * 2 / 3, by_nodes = sent(true);
  CHECK(by_nodes / flat > 0.499);
  CHECK(by_nodes / flat < 0.501);
}

TEST_CASE("nodes as workers count what the exchange has sent", "[collectives][onebit][nodes]") {
  const Ranks ranks = nodes_of(2, 2);
  std::vector<int64_t> counted(ranks.size());
  const auto messages = run_ranks(4, [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    CompressedAllReduce mean(ranks[own], 100'000, CompressionOptions().hierarchical(true));
    ranks[own]->set_phase("compressed");
    mean.reduce(at::zeros({100'000}));
    counted[own] = mean.bytes_sent();
  });
  REQUIRE(first_of(messages) == "");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    int64_t sent = 0;
    for (const Traffic& entry : ranks[rank]->traffic()) {
      if (entry.phase != "compressed") continue;
      if (entry.operation == "all_to_all" || entry.operation == "all_gather") sent += entry.bytes_sent;
    }
    CHECK(counted[rank] == sent);
  }
}

TEST_CASE("nodes as workers go on from stored errors", "[collectives][onebit][nodes]") {
  const OneBitInputs inputs = random_inputs(3002, 5000);
  const auto options = CompressionOptions().hierarchical(true);
  const auto whole = run_onebit(nodes_of(2, 2), 5000, options, 0, 6, inputs);
  const auto first = run_onebit(nodes_of(2, 2), 5000, options, 0, 3, inputs);
  const auto rest =
      run_onebit(nodes_of(2, 2), 5000, options, 3, 6, inputs, [&](CompressedAllReduce& mean, size_t rank) {
        mean.set_errors(first.worker_errors[rank], first.server_errors[rank]);
      });
  REQUIRE(first_of(rest.messages) == "");
  for (size_t rank = 0; rank < 4; ++rank) {
    for (size_t call = 0; call < 3; ++call) {
      CHECK(same_bits(rest.means[rank][call], whole.means[rank][call + 3]));
    }
    CHECK(same_bits(rest.worker_errors[rank], whole.worker_errors[rank]));
  }
}

TEST_CASE("nodes as workers are refused where ranks disagree", "[collectives][onebit][nodes]") {
  const Ranks ranks = nodes_of(2, 2);
  const auto messages = run_ranks(4, [&](int rank) {
    CompressedAllReduce(ranks[static_cast<size_t>(rank)], 100, CompressionOptions().hierarchical(rank != 3));
  });
  for (const std::string& message : messages) CHECK(contains(message, "by nodes of"));
}

}  // namespace pacer::testing::compressed_nodes
