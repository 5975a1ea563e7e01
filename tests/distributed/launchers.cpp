// Ranks that learn from their launcher's variables who they are.
#include <cstdlib>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <pacer/collectives/communicator.h>

#include "scenario.h"

namespace pacer::testing {
namespace {

// The rank and world size of the command line do not count here.
const AddScenario environment("environment", [](const Player& player) {
  const auto world = Communicator::from_environment(player.options());
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
  world->barrier();
});

}  // namespace
}  // namespace pacer::testing
