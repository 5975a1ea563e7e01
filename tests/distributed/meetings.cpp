// How ranks find each other, and what they say where they do not.
#include <cstdio>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <pacer/collectives/detail/rank_health.h>

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
  if (!player.has("stay")) return;
  say("staying");
  sleep_for_ever();
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

// What one rank says of itself reaches the others, from any thread, and the first reason stays.
const AddScenario news("news", [](const Player& player) {
  const detail::Connection world = player.connect();
  detail::RankHealth& rank_health = *world.rank_health;
  const std::vector<int> all = detail::all_ranks(player.world_size);
  expect(!rank_health.find_trouble(all), "no trouble that nobody told of");
  add_up(world);  // everybody has looked
  const std::string reason("a\0b\nc", 5);
  if (player.rank > 0) {
    std::thread([&] { rank_health.leave(reason + std::to_string(player.rank)); }).join();
    rank_health.leave("later");
  }
  for (int rank = 1; rank < player.world_size; ++rank) {
    if (rank == player.rank) continue;
    const Stopwatch since;
    const std::string left = detail::concatenate("rank ", rank, " left: ", reason, rank);
    while (true) {
      const auto trouble = rank_health.find_trouble({player.rank, rank});
      if (trouble && trouble->text == left && trouble->ranks == std::vector<int>{rank}) break;
      expect(since.milliseconds() < 20000 && !trouble, "the reason of rank ", rank);
      std::this_thread::sleep_for(1ms);
    }
  }
  add_up(world);  // nobody goes before everybody has read
});

// Asks the store while the process that keeps it is stopped.
const AddScenario silent_store("silent_store", [](const Player& player) {
  const detail::Connection world = player.connect();
  say("ready");
  if (player.rank == 0) sleep_for_ever();
  std::this_thread::sleep_for(std::chrono::milliseconds(player.number("after")));
  for (int i = 0; i < 2; ++i) {
    const Stopwatch since;
    try {
      world.rank_health->leave("no reason");
      say("told");
    } catch (const std::exception& error) {
      say(detail::concatenate("refused after ", since.milliseconds(), " ms: ", error.what()));
    }
    const auto trouble = world.rank_health->find_trouble({0});
    say("trouble: " + (trouble ? trouble->text : "unknown"));
  }
  // Until the rank that holds the store goes on.
  const Stopwatch since;
  while (true) {
    try {
      world.rank_health->leave("no reason");
      break;
    } catch (const detail::StoreSilent&) {
      expect(since.milliseconds() < 20000, "an answer of a store that goes on");
    }
  }
  say("goes on");
});

}  // namespace
}  // namespace pacer::testing
