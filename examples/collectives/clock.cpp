// Every rank keeps its own times; they are compared only after the clock has stopped.
#include "clock.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include <ATen/ops/empty.h>
#include <torch/cuda.h>

namespace collectives {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// On CUDA the host is ahead of the device; a clock must see both.
void synchronize(const pacer::Communicator& world) {
  if (world.device().is_cuda()) torch::cuda::synchronize(world.device().index());
}

double run_once(pacer::Communicator& world, const Way& way) {
  if (way.prepare) way.prepare();
  synchronize(world);
  world.barrier();
  const Stopwatch watch;
  way.run();
  synchronize(world);
  return watch.seconds();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

std::vector<double> gather(pacer::Communicator& world, double value) {
  const at::Tensor own = at::empty({1}, at::kDouble), all = at::empty({world.world_size()}, at::kDouble);
  own.fill_(value);
  world.all_gather_host(all, own).wait();
  const auto* first = all.const_data_ptr<double>();
  return {first, first + world.world_size()};
}

int64_t payload_sent(const pacer::Communicator& world) {
  int64_t bytes = 0;
  for (const pacer::Traffic& entry : world.traffic()) {
    if (entry.operation != "agreement") bytes += entry.bytes_sent;
  }
  return bytes;
}

std::vector<Timing> measure(pacer::Communicator& world, const std::vector<Way>& ways,
                            const Patience& patience) {
  std::vector<Timing> timings(ways.size());
  double round = 0;  // seconds of all ways
  for (size_t i = 0; i < ways.size(); ++i) {
    const int64_t before = payload_sent(world);
    const auto seconds = gather(world, run_once(world, ways[i]));
    round += *std::max_element(seconds.begin(), seconds.end());
    const auto sent = gather(world, static_cast<double>(payload_sent(world) - before));
    timings[i].busiest_bytes = static_cast<int64_t>(*std::max_element(sent.begin(), sent.end()));
  }
  const auto wanted = static_cast<int64_t>(patience.seconds / std::max(round, 1e-6));
  const int64_t repetitions = std::clamp(wanted, patience.at_least, patience.at_most);

  std::vector<std::vector<double>> means(ways.size()), slowest(ways.size());
  for (int64_t repetition = 0; repetition < repetitions; ++repetition) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const auto seconds = gather(world, run_once(world, ways[i]));
      const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
      means[i].push_back(sum / world.world_size());
      slowest[i].push_back(*std::max_element(seconds.begin(), seconds.end()));
    }
  }
  for (size_t i = 0; i < ways.size(); ++i) {
    timings[i].mean = median(means[i]);
    timings[i].slowest = median(slowest[i]);
    timings[i].repetitions = repetitions;
  }
  return timings;
}

}  // namespace collectives
