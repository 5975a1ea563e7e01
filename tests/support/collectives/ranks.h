// Threads as ranks: runs a function once for each rank and collects what they throw.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <pacer/collectives/communicator.h>

namespace pacer::testing {

using Ranks = std::vector<std::shared_ptr<Communicator>>;

// Nodes of so many ranks; 0: what the ranks find themselves.
inline CommunicatorOptions by_nodes_of(int ranks_per_node) {
  CommunicatorOptions options;
  if (ranks_per_node != 0) options.ranks_per_node(ranks_per_node);
  return options;
}

inline void require_on_rank(bool holds, const char* words, const char* file, int line) {
  if (!holds) throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": not so: " + words);
}

// Catch2's assertions are for one thread at a time, and one that fails in another ends the program. This one
// throws, and run_ranks returns what it says.
#define RANK_REQUIRE(...) \
  pacer::testing::require_on_rank(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

// f(rank) in a thread of its own for each rank; the message of what it threw, "" where it threw nothing.
[[nodiscard]] inline std::vector<std::string> run_ranks(int world_size, const std::function<void(int)>& f) {
  std::vector<std::string> messages(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        f(rank);
      } catch (const std::exception& error) {
        messages[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return messages;
}

// The first message, or "".
inline std::string first_of(const std::vector<std::string>& messages) {
  for (const std::string& message : messages) {
    if (!message.empty()) return message;
  }
  return "";
}

// What this rank has counted for an operation: in one phase, or in all of them.
inline Traffic traffic_of(const Communicator& world, const std::string& operation,
                          const std::optional<std::string>& phase = std::nullopt) {
  Traffic all;
  all.operation = operation;
  for (const Traffic& traffic : world.traffic()) {
    if (traffic.operation != operation || (phase && traffic.phase != *phase)) continue;
    all.calls += traffic.calls;
    all.bytes_sent += traffic.bytes_sent;
  }
  return all;
}

}  // namespace pacer::testing
