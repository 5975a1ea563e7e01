// 1-bit optimizers on processes whose buckets travel while backward runs: the bits of those that wait for the
// step, over the same ranks.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scenario.h"
#include "support/collectives/momentum_lane.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

template <class Optimizer, class Options>
std::pair<RegisteredOptimizer, RegisteredOptimizer> ahead_and_behind(Options options, at::ScalarType dtype) {
  options.weight_decay(0.1).bucket_bytes(1000);
  const auto make = [&](bool overlap) {
    return RegisteredOptimizer{overlap ? "ahead" : "behind", true,
                               making_onebit<Optimizer>(Options(options).overlap_backward(overlap)), dtype,
                               true};
  };
  return {make(true), make(false)};
}

void train_all(const Player& player, const std::shared_ptr<Communicator>& world, bool clips) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (hook.name == "accumulation" || hook.name == "layer drop") hooks.push_back(hook);
    if (clips && hook.name == "clipping by the norm before") hooks.push_back(hook);
  }
  for (const auto& [ahead, behind] :
       {ahead_and_behind<OneBitAdam>(OneBitAdamOptions(0.01).refresh_variance_every(5), at::kFloat),
        ahead_and_behind<OneBitLamb>(OneBitLambOptions(0.01), at::kBFloat16)}) {
    const int64_t before = sent_there(*world);
    SmallRun one(ahead, hooks, /*dropout=*/0, world), other(behind, hooks, /*dropout=*/0, world);
    for (int64_t step = 0; step < player.number("steps"); ++step) {
      one.step();
      other.step();
      const auto state = one.state(), wanted = other.state();
      for (const auto part : {&detail::TrainingState::model, &detail::TrainingState::optimizer,
                              &detail::TrainingState::rank_optimizer}) {
        const std::string difference = first_difference(state.*part, wanted.*part);
        expect(difference.empty(), "no difference from buckets that wait after step ", step, ", but ",
               difference, " differs");
      }
    }
    expect(sent_there(*world) - before > player.number("steps"), "buckets in lanes of their own");
    one.finish();
    other.finish();
  }
}

void train_ahead(const Player& player) {
  const auto options = player.options();
  const auto world = std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
  for (const bool clips : {false, true}) train_all(player, world, clips);
}

const AddScenario kAhead("train_ahead", train_ahead);

}  // namespace
}  // namespace pacer::testing
