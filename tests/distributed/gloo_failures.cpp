// What operations of the Gloo transport do when a rank does not take part: killed, stopped, late, or ended by
// its own program.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "gloo_calls.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;
using detail::TransportTimeout;
using detail::TransportWorkPtr;

// Returns once all but the last rank are here. By files, as the connections are what is tried: a rank that
// ends its own while another still starts operations would fail these at their start.
void meet_all_but_last(const Player& player) {
  const auto note_of = [&](int rank) { return detail::concatenate(player.text("file"), ".here.", rank); };
  std::ofstream(note_of(player.rank)).close();
  for (int rank = 0; rank < player.world_size - 1; ++rank) {
    while (!std::filesystem::exists(note_of(rank))) std::this_thread::sleep_for(1ms);
  }
}

// The last rank is there, but does not take part; run_ranks.py may kill or stop it.
const AddScenario absent("absent", [](const Player& player) {
  detail::Connection world = player.connect();
  say("ready");
  if (is_last(player)) sleep_for_ever();
  const Stopwatch since;
  const std::string operation = player.text("operation");
  const std::chrono::milliseconds call(player.number("call"));
  say_failure(operation, since, start(*world.data, operation, player, call));
  const Stopwatch ending;
  world.data->abort();
  world.control->abort();
  expect_refusal(*world.data, player);
  world = {};
  say(detail::concatenate("ended after ", ending.milliseconds(), " ms"));
});

// The last rank comes late. Who waits must hold its own deadline, not the group's.
const AddScenario late("late", [](const Player& player) {
  const detail::Connection world = player.connect();
  const std::chrono::milliseconds call(player.number("call"));
  world.control->all_reduce(at::ones({1}), 20s)->wait();  // all start the clock together
  if (is_last(player)) std::this_thread::sleep_for(std::chrono::milliseconds(player.number("late")));
  const std::string operation = player.text("operation");
  const Stopwatch since;
  TransportWorkPtr work;
  if (is_last(player) && operation == "receive") {
    work = world.data->exchange({Message::send(at::ones({1000}), 0)}, 20s);
  } else if (player.rank > 0 && operation == "receive") {
    return sleep_for_ever();
  } else {
    work = start(*world.data, operation, player, is_last(player) ? 20000ms : call);
  }
  if (player.has("poll")) {
    while (!work->is_done()) std::this_thread::sleep_for(1ms);
  }
  try {
    work->wait();
    say("success");
  } catch (const TransportTimeout&) {
    say(detail::concatenate("timeout after ", since.milliseconds(), " ms"));
  } catch (const std::exception& error) {
    say(detail::concatenate("failed after ", since.milliseconds(), " ms: ", error.what()));
  }
});

// Rank 0 ends the operation that all but the last wait for, by another thread.
const AddScenario abort_from_a_thread("abort", [](const Player& player) {
  detail::Connection world = player.connect();
  say("ready");
  if (is_last(player)) sleep_for_ever();
  std::vector<TransportWorkPtr> works;
  // More than Gloo has threads for.
  for (int i = 0; i < 5; ++i) works.push_back(start(*world.data, "all_reduce", player, 20s));
  works.push_back(start(*world.data, "receive", player, 20s));
  meet_all_but_last(player);
  std::thread aborting;
  std::this_thread::sleep_for(300ms);
  const Stopwatch since;
  if (player.rank == 0) {
    aborting = std::thread([data = world.data] {
      std::this_thread::sleep_for(200ms);
      const Stopwatch taken;
      for (int i = 0; i < 3; ++i) data->abort();
      say(detail::concatenate("abort took ", taken.milliseconds(), " ms"));
    });
  }
  if (player.has("backwards")) std::swap(works.front(), works.back());
  for (const TransportWorkPtr& work : works) say_failure("all", since, work);
  if (aborting.joinable()) aborting.join();
  works.clear();
  const Stopwatch ending;
  world = {};
  say(detail::concatenate("ended after ", ending.milliseconds(), " ms"));
});

// Rank 0 does not take part, and ends its connections while the others wait.
const AddScenario abort_of_absent("abort_of_absent", [](const Player& player) {
  const detail::Connection world = player.connect();
  if (player.rank == 0) {
    std::this_thread::sleep_for(500ms);
    world.data->abort();
    std::this_thread::sleep_for(3s);  // it is abort() that the others notice, not the end
    return;
  }
  const Stopwatch since;
  say_failure("all_reduce", since, start(*world.data, "all_reduce", player, 20s));
  world.data->abort();
});

// How many threads of this process block SIGPIPE, and how many do not, as Linux tells it.
const AddScenario signals("signals", [](const Player& player) {
  const detail::Connection world = player.connect();
  start(*world.data, "all_reduce", player, 5s)->wait();
  constexpr uint64_t kSigpipe = 1ull << (SIGPIPE - 1);
  int blocked = 0, others = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigBlk:", 0) != 0) continue;
      ((std::stoull(line.substr(7), nullptr, 16) & kSigpipe) != 0 ? blocked : others) += 1;
    }
  }
  say(detail::concatenate("blocked in ", blocked, ", not in ", others));
});

// The last rank takes part, but is killed before the others do: these write to a connection that is gone.
const AddScenario gone("gone", [](const Player& player) {
  const detail::Connection world = player.connect();
  const std::string operation = player.text("operation");
  std::vector<TransportWorkPtr> works;
  if (is_last(player)) {
    for (const char* one : {"all_reduce", "all_to_all"})
      works.push_back(start(*world.data, one, player, 20s));
    for (const int peer : {0, 1}) {
      works.push_back(world.data->exchange({Message::send(at::ones({1000}), peer)}, 20s));
    }
    say("ready");
    sleep_for_ever();
  }
  say("ready");
  while (!std::filesystem::exists(player.text("file") + ".killed")) std::this_thread::sleep_for(1ms);
  const Stopwatch since;
  for (int i = 0; i < 3; ++i) {
    try {
      works.push_back(start(*world.data, operation, player, 5s));
    } catch (const std::exception& error) {
      return say(detail::concatenate("refused after ", since.milliseconds(), " ms: ", error.what()));
    }
  }
  say_failure(operation, since, works.back());
});

// Works and transports go before anything is done.
const AddScenario dropped("dropped", [](const Player& player) {
  detail::Connection world = player.connect();
  say("ready");
  if (is_last(player)) sleep_for_ever();
  std::vector<TransportWorkPtr> kept;
  for (const char* operation :
       {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "receive", "send"}) {
    start(*world.data, operation, player, 20s);
    start(*world.data, operation, player, 20s)->is_done();
    kept.push_back(start(*world.data, operation, player, 20s));
  }
  meet_all_but_last(player);
  const Stopwatch ending;
  if (player.has("works_first")) kept.clear();
  world = {};
  say(detail::concatenate("ended after ", ending.milliseconds(), " ms"));
  if (!player.has("works_first")) {
    for (const TransportWorkPtr& work : kept) say_failure("kept", ending, work);
  }
});

// Ranks disagree on the size of a message: an error at the deadline, and no terminate().
const AddScenario contradiction("contradiction", [](const Player& player) {
  const detail::Connection world = player.connect();
  const bool first = player.rank == 0;
  const at::Tensor tensor = at::ones({first == player.has("first_sends_more") ? 1000 : 10});
  // Rank 1 sends rank 0 three elements, not five.
  const int64_t own = first ? 5 : 7;
  const std::vector<int64_t> sent_counts{first ? 5 : 3, own}, received_counts{5, own};
  const at::Tensor sent = at::ones({10}), received = at::zeros({first ? 10 : 12});
  const Stopwatch since;
  TransportWorkPtr work;
  if (player.has("all_to_all")) {
    work = world.data->all_to_all(received, received_counts, sent, sent_counts, 1s);
  } else {
    work = world.data->exchange({first ? Message::send(tensor, 1) : Message::receive(tensor, 0)}, 1s);
  }
  say_failure("message", since, work);
});

// Dropped messages neither hold up those that come after them nor change them.
const AddScenario dropped_messages("dropped_messages", [](const Player& player) {
  const detail::Connection world = player.connect();
  const int peer = 1 - player.rank;
  for (int i = 0; i < 50; ++i) {
    const at::Tensor sent = at::full({10000}, i, at::kLong), received = at::zeros({10000}, at::kLong);
    if (player.rank == 0) {
      const TransportWorkPtr work = world.data->exchange({Message::send(sent, peer)}, 20s);
      if (i % 2 == 0) continue;
      work->wait();
    } else {
      const TransportWorkPtr work = world.data->exchange({Message::receive(received, peer)}, 20s);
      if (i % 3 == 0) work->is_done();
      if (i % 2 == 0) continue;
      work->wait();
      expect(at::equal(sent, received), "message ", i);
    }
  }
});

}  // namespace
}  // namespace pacer::testing
