// Calls of the Gloo transport by the names of operations, for scenarios in which a rank does not take part.
#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>

#include <pacer/collectives/detail/transport.h>

#include "scenario.h"

namespace pacer::testing {

inline detail::TransportWorkPtr start(detail::Transport& world, const std::string& operation,
                                      const Player& player, std::chrono::milliseconds timeout,
                                      int64_t n = 1000) {
  const at::Tensor one = at::ones({n}), many = at::ones({n * player.world_size});
  const std::vector<int64_t> counts(static_cast<size_t>(player.world_size), n);
  const int other = player.world_size - 1;  // the one that is absent
  if (operation == "all_reduce") return world.all_reduce(one, timeout);
  if (operation == "reduce_scatter") return world.reduce_scatter(one, many, timeout);
  if (operation == "all_gather") return world.all_gather(many, one, timeout);
  if (operation == "all_to_all") return world.all_to_all(many, counts, at::ones_like(many), counts, timeout);
  if (operation == "broadcast") return world.broadcast(one, other, timeout);
  if (operation == "receive") return world.exchange({Message::receive(one, other)}, timeout);
  if (operation == "send") return world.exchange({Message::send(one, other)}, timeout);
  throw Error("no operation " + operation);
}

// Says "WHAT: timeout after N ms" or "WHAT: failed after N ms: words"; throws where nothing was thrown.
inline void say_failure(const std::string& what, const Stopwatch& since,
                        const detail::TransportWorkPtr& work) {
  try {
    work->wait();
  } catch (const detail::TransportTimeout& error) {
    expect(work->is_done(), what, " to be done after its deadline");
    say(detail::concatenate(what, ": timeout after ", since.milliseconds(), " ms: ", error.what()));
    return;
  } catch (const std::exception& error) {
    say(detail::concatenate(what, ": failed after ", since.milliseconds(), " ms: ", error.what()));
    return;
  }
  throw Error(what + " came to an end without the last rank");
}

inline void expect_refusal(detail::Transport& world, const Player& player) {
  try {
    start(world, "all_reduce", player, std::chrono::seconds(1))->wait();
  } catch (const std::exception&) {
    return;
  }
  throw Error("expected a refusal after abort()");
}

inline bool is_last(const Player& player) { return player.rank == player.world_size - 1; }

}  // namespace pacer::testing
