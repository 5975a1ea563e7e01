#include <optional>

#include "training.h"

namespace bench::overlap {
namespace {

// Where the time of a step goes, each part by itself: until backward has ended on the device, in step(), and
// of that until step() returns to the host. Of this rank; medians.
void print_parts(const World& world, const std::string& what, Training& training) {
  constexpr int kSteps = 11;
  std::vector<double> backward, returned, ended;
  for (int i = 0; i < kSteps; ++i) {
    synchronize(world->device());
    world->barrier();
    backward.push_back(milliseconds_of(world->device(), [&] { training.backward(); }));
    const Stopwatch of_step;
    training.session->step();
    returned.push_back(of_step.milliseconds());
    synchronize(world->device());
    ended.push_back(of_step.milliseconds());
  }
  print(*world, what + ": until backward ended", spread_of(backward).median);
  print(*world, what + ": step()", spread_of(ended).median);
  print(*world, what + ": step(), on the host", spread_of(returned).median);
}

}  // namespace

void time_onebit(const Shape& shape, const World& world, int64_t rounds, int64_t steps) {
  {
    Training training(shape, world, true);
    const std::string what = "DataParallel and FusedAdamW";
    print(*world, what + " step", slowest(*world, rounds, steps, [&] { training.step(); }));
    print_parts(world, what, training);
    training.session->finish();
  }
  const auto timed = [&](const std::string& what, std::optional<int64_t> mebibytes, bool overlap) {
    auto options = pacer::OneBitAdamOptions(1e-5).betas({0.9, 0.5}).freeze_step(2).overlap_backward(overlap);
    if (mebibytes) options.bucket_bytes(*mebibytes << 20);
    Training training(
        shape, world, true, [](pacer::Session&) {},
        [&](auto parameters, const World& ranks) {
          return std::make_unique<pacer::OneBitAdam>(std::move(parameters), options, ranks);
        });
    for (int i = 0; i < 4; ++i) training.step();
    const auto& optimizer = dynamic_cast<const pacer::OneBitAdam&>(*training.optimizer);
    pacer::require(optimizer.phase() == pacer::OneBitPhase::compressed, "OneBitAdam is still in its warm-up");
    print(*world, what, slowest(*world, rounds, steps, [&] { training.step(); }));
    if (!mebibytes && !overlap) print_parts(world, "OneBitAdam", training);
    training.session->finish();
  };
  timed("OneBitAdam step, one buffer", std::nullopt, false);
  timed("OneBitAdam step, one buffer, behind backward", std::nullopt, true);
  for (const int64_t mebibytes : {8, 25, 100}) {
    const std::string buckets = "OneBitAdam step, buckets of " + std::to_string(mebibytes) + " MiB";
    timed(buckets, mebibytes, false);
    timed(buckets + ", behind backward", mebibytes, true);
  }
}

}  // namespace bench::overlap
