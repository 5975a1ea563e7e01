// Ranks that learn from their launcher's variables who they are.
#include <cstdio>
#include <cstdlib>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <pacer/collectives/communicator.h>

#include "scenario.h"

namespace pacer::testing {
namespace {

// The process of rank `dies` ends without a word, once for all attempts of a launch, which share the file
// `once`, at the place `at`.
void die_once(const Player& player, const char* place) {
  const char* const rank = std::getenv("RANK");
  if (!player.has("dies") || player.text("at") != place || rank == nullptr || player.text("dies") != rank)
    return;
  if (std::FILE* const once = std::fopen(player.text("once").c_str(), "wx")) {
    std::fclose(once);
    std::_Exit(7);
  }
}

// The rank and world size of the command line do not count here.
const AddScenario environment("environment", [](const Player& player) {
  die_once(player, "start");
  const auto world = Communicator::from_environment(player.options());
  die_once(player, "met");
  const at::Tensor one = at::ones({10});
  world->all_reduce(one).wait();
  expect(at::equal(one, at::full({10}, world->world_size())), "a sum over all ranks");
  say(detail::concatenate("rank ", world->rank(), " of ", world->world_size(), ", here ", world->local_rank(),
                          " of ", world->local_size(), ", by nodes of ", world->ranks_per_node()));
  if (player.has("stay")) sleep_for_ever();
  // Fails in the first attempt of torchrun only.
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (player.has("fail_once") && attempt != nullptr && *attempt == '0')
    throw Error("this is the first attempt");
  die_once(player, "step");
  world->barrier();
  if (player.has("dies")) {
    // A second meeting of the same processes, in the same attempt.
    Communicator::from_environment(player.options())->barrier();
    say(detail::concatenate("rank ", world->rank(), " is done"));
  }
});

}  // namespace
}  // namespace pacer::testing
