// What becomes of a rank when a call into Gloo never returns. When connections are reset, Gloo's writing
// thread and its reading one can wait for each other for ever; here a write that never returns has the same
// effect.
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/gloo_transport.h>

#include "gloo_calls.h"

namespace pacer::testing {
namespace {

// The next write to a connection of Gloo never returns, and keeps the locks that Gloo has taken for it.
std::atomic<bool> next_write_is_stuck{false};
std::atomic<int> stuck_writes{0};
// It fails with an error for which Gloo's reading thread has no answer but an exception.
std::atomic<bool> next_write_fails{false};

}  // namespace
}  // namespace pacer::testing

// Stands before the C library's, in a program that is not forked off one that has that already.
extern "C" ssize_t writev(int file, const iovec* parts, int count) {
  if (pacer::testing::next_write_is_stuck.exchange(false)) {
    ++pacer::testing::stuck_writes;
    pacer::testing::sleep_for_ever();
  }
  if (pacer::testing::next_write_fails.exchange(false)) {
    errno = ECONNABORTED;
    return -1;
  }
  return syscall(SYS_writev, file, parts, count);
}

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

// Operations in which the last rank does not take part, each in connections of its own. With stuck=1 a write
// of the others is stuck, too.
const AddScenario alone_in_operations("alone_in_operations", [](const Player& player) {
  const detail::Connection world = player.connect();
  detail::GroupMembership all;
  all.rank = player.rank;
  for (int rank = 0; rank < player.world_size; ++rank) all.members.push_back(rank);
  all.in_world = all.members;
  std::vector<detail::Connection> groups;
  for (const char* operation :
       {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "receive", "send"}) {
    groups.push_back(world.join(all));
    if (is_last(player)) continue;
    detail::Connection& group = groups.back();
    const auto earlier = group.data->exchange({Message::receive(at::ones({7}), player.world_size - 1)}, 20s);
    next_write_is_stuck = player.has("stuck");
    const Stopwatch since;
    say_failure(operation, since, start(*group.data, operation, player, 1s));
    const Stopwatch ending;
    expect_refusal(*group.data, player);
    group.data->abort();
    say_failure("earlier", ending, earlier);
    group = {};
    say(detail::concatenate("ended after ", ending.milliseconds(), " ms"));
  }
  if (is_last(player)) sleep_for_ever();
  if (player.has("stuck"))
    expect(stuck_writes >= 5, "writes of five operations to be stuck, not ", stuck_writes);
});

// The same for a program. Its calls say what happened, the second time at once.
const AddScenario stuck_program("stuck_program", [](const Player& player) {
  const auto world = std::make_shared<Communicator>(player.connect(), player.options());
  const std::string operation = player.text("operation");
  world->set_step(7);
  world->barrier();
  next_write_is_stuck = player.rank == 0;
  for (const char* which : {"first", "second"}) {
    const Stopwatch since;
    try {
      if (operation == "all_reduce")
        world->all_reduce(at::ones({1000}), CollectiveOptions().agreed(true)).wait();
      if (operation == "barrier") world->barrier();
      if (operation == "exchange") world->exchange("text");
      if (operation == "split") world->split(0, player.rank);
      if (operation == "lane") world->lane("lane");
      say(std::string(which) + " call was done");
    } catch (const CommunicationError& error) {
      say(detail::concatenate(which, " call failed after ", since.milliseconds(), " ms: ", error.what()));
    }
  }
});

// Rank 1 receives late, so that it is the reading thread of rank 0 that writes the message.
const AddScenario thrown("thrown", [](const Player& player) {
  detail::Connection world = player.connect();
  world.data->all_reduce(at::ones({1}), 20s)->wait();
  if (player.rank == 1) std::this_thread::sleep_for(600ms);
  const Stopwatch since;
  const auto work = world.data->exchange(
      {player.rank == 0 ? Message::send(at::ones({1000}), 1) : Message::receive(at::ones({1000}), 0)}, 2s);
  if (player.rank == 0) {
    std::this_thread::sleep_for(300ms);
    next_write_fails = true;
  }
  say_failure("message", since, work);
  world = {};
  say("ended");
});

// All ranks tell each other where they listen, but the last one stops before they are connected.
const AddScenario half_connected("half_connected", [](const Player& player) {
  const detail::Connection world = player.connect();
  const detail::Gather gather = detail::gather_over(world.control, player.world_size, 20s);
  detail::GlooSetup setup;
  setup.rank = player.rank;
  setup.world_size = player.world_size;
  setup.address = "127.0.0.1";
  setup.timeout = std::chrono::milliseconds(player.number("call"));
  setup.gather = [&](const std::string& own) {
    const auto all = gather(own);
    if (is_last(player)) raise(SIGSTOP);
    return all;
  };
  const Stopwatch since;
  try {
    detail::make_gloo_transport(setup)->all_reduce(at::ones({1}), setup.timeout)->wait();
  } catch (const std::exception& error) {
    say(detail::concatenate("failed after ", since.milliseconds(), " ms: ", error.what()));
  }
});

}  // namespace
}  // namespace pacer::testing
