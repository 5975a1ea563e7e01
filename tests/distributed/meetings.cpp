// How ranks find each other, and what they say where they do not.
#include <cstdio>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <pacer/collectives/detail/watched_board.h>

#include "scenario.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

void add_up(const detail::Connection& world) {
  const at::Tensor one = at::ones({10});
  world.data->all_reduce(one, 20s)->wait();
  expect(at::equal(one, at::full({10}, world.world_size)), "a sum over all ranks");
}

// Meets, adds once, and stays if asked to.
const AddScenario meet("meet", [](const Player& player) {
  const Stopwatch since;
  say("starting");
  const detail::Connection world = player.connect();
  say(detail::concatenate("met after ", since.milliseconds(), " ms"));
  add_up(world);
  if (player.has("stay")) sleep_for_ever();
});

// One after the other and two at a time, at one place.
const AddScenario meet_again("meet_again", [](const Player& player) {
  for (int round = 0; round < 5; ++round) {
    // Who is early finds nobody, or the last meeting's store.
    if (round % 2 == 0) std::this_thread::sleep_for(100ms * player.rank);
    const detail::Connection first = player.connect();
    add_up(first);
    if (round % 2 == 1 && player.rank == 0) std::this_thread::sleep_for(300ms);
    if (round % 2 == 0) {
      const detail::Connection second = player.connect();
      add_up(first);
      add_up(second);
    }
  }
});

// Notices reach everybody, from any thread, and the first one of a key stays.
const AddScenario notices("notices", [](const Player& player) {
  const detail::Connection world = player.connect();
  detail::NoticeBoard& board = *world.board;
  expect(!board.read("nothing"), "no notice that nobody posted");
  const std::string own = std::to_string(player.rank), text("a\0b\nc", 5);
  std::thread([&] { board.post("from/" + own, text + own); }).join();
  board.post("from/" + own, "later");
  board.post("empty/" + own, "");
  for (int rank = 0; rank < player.world_size; ++rank) {
    const Stopwatch since;
    const std::string other = std::to_string(rank);
    while (!board.read("from/" + other) || !board.read("empty/" + other)) {
      expect(since.milliseconds() < 20000, "a notice from rank ", rank);
      std::this_thread::sleep_for(1ms);
    }
    expect(board.read("from/" + other) == text + other, "the first text of rank ", rank);
    expect(board.read("empty/" + other) == "", "the empty text of rank ", rank);
  }
  add_up(world);  // nobody goes before everybody has read
});

// Reads the board while the host of the store is stopped.
const AddScenario silent_board("silent_board", [](const Player& player) {
  const detail::Connection world = player.connect();
  say("ready");
  if (player.rank == 0) sleep_for_ever();
  std::this_thread::sleep_for(std::chrono::milliseconds(player.number("after")));
  for (int i = 0; i < 2; ++i) {
    const Stopwatch since;
    try {
      world.board->read("left/0");
      say("read");
    } catch (const std::exception& error) {
      say(detail::concatenate("refused after ", since.milliseconds(), " ms: ", error.what()));
    }
    const auto trouble = detail::find_trouble(*world.board, player.rank, player.world_size);
    say("trouble: " + trouble.value_or("unknown"));
  }
  // Until the host goes on.
  const Stopwatch since;
  while (true) {
    try {
      world.board->read("left/0");
      break;
    } catch (const detail::BoardSilent&) {
      expect(since.milliseconds() < 20000, "an answer of a store that goes on");
    }
  }
  say("goes on");
});

}  // namespace
}  // namespace pacer::testing
