// pacer-cpu-bench: the CPU kernels of gradient norm and compressed step over GPT-2's 124.4 M parameters, each
// beside a loop that moves as many streams, with one thread and with all. All take their turns, round after
// round, so that a neighbour that slows the machine for a while slows all of them; best and median of the
// rounds are printed.
//
//   pacer-cpu-bench [ROUNDS]
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "bench/timing.h"
#include "parts.h"
#include "streams.h"

namespace {

void measure(std::vector<cpu_bench::Part>& parts, cpu_bench::Streams& streams, int threads, int64_t rounds) {
  std::vector<std::function<void()>> works;
  for (const cpu_bench::Mix mix : cpu_bench::kMixes) works.push_back([&, mix] { streams.run(mix, threads); });
  for (const cpu_bench::Part& part : parts) works.push_back([&] { part.run(threads); });
  for (const auto& work : works) work();
  const auto spreads = bench::interleave(works, {rounds, rounds, 0});

  std::printf("\n%d thread%s time, best of %lld rounds (median)\n\n", threads,
              threads == 1 ? ", processor" : "s, wall", static_cast<long long>(rounds));
  std::printf("| loop | GB/s | |\n| --- | ---: | ---: |\n");
  // With more threads, nobody adds up the time of all of them.
  const auto time = threads == 1 ? &bench::Interleaved::processor : &bench::Interleaved::wall;
  const auto speed = [](double bytes, double milliseconds) { return bytes / milliseconds * 1e-6; };
  for (size_t i = 0; i < std::size(cpu_bench::kMixes); ++i) {
    const double bytes = cpu_bench::Streams::bytes(cpu_bench::kMixes[i]);
    std::printf("| %s | %.1f | (%.1f) |\n", name_of(cpu_bench::kMixes[i]),
                speed(bytes, (spreads[i].*time).min), speed(bytes, (spreads[i].*time).median));
  }
  std::printf(
      "\n| kernel | ms | | GB/s | of | share | |\n| --- | ---: | ---: | ---: | --- | ---: | ---: |\n");
  for (size_t i = 0; i < parts.size(); ++i) {
    const cpu_bench::Part& part = parts[i];
    const auto mix = static_cast<size_t>(part.mix);
    const bench::Spread& spread = spreads[std::size(cpu_bench::kMixes) + i].*time;
    const double bytes = cpu_bench::Streams::bytes(part.mix);
    const auto share = [&](double bench::Spread::*of) {
      return 100 * speed(part.bytes, spread.*of) / speed(bytes, (spreads[mix].*time).*of);
    };
    std::printf("| %s | %.1f | (%.1f) | %.1f | %s | %.0f %% | (%.0f %%) |\n", part.name.c_str(), spread.min,
                spread.median, speed(part.bytes, spread.min), name_of(part.mix), share(&bench::Spread::min),
                share(&bench::Spread::median));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 15;
  if (rounds < 1) {
    std::fprintf(stderr, "pacer-cpu-bench: ROUNDS must be a number of at least 1, not '%s'\n", argv[1]);
    return 2;
  }
  cpu_bench::Streams streams;
  std::vector<cpu_bench::Part> parts = cpu_bench::make_parts();
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  measure(parts, streams, 1, rounds);
  if (all > 1) measure(parts, streams, all, rounds);
}
