// The CPU kernels of gradient norm and compressed step, each beside a loop that moves as many streams.
#include <cstdio>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "parts.h"
#include "subcommands.h"
#include "support/streams.h"
#include "support/table.h"
#include "support/timing.h"

namespace bench::cpu {
namespace {

constexpr const char* kAbout =
    R"(Measures the CPU kernels of gradient norm and compressed step over GPT-2's 124.4 M parameters, each
beside a loop that moves as many streams, with one thread and with all. All take their turns, round
after round, so that a neighbour that slows the machine for a while slows all of them; best and
median of the rounds are printed.

  pacer-bench cpu [ROUNDS]
)";

constexpr Mix kMixes[] = {Mix::read, Mix::update, Mix::update_from1, Mix::update_from2};

void measure(std::vector<Part>& parts, Streams& streams, int threads, int64_t rounds) {
  std::vector<std::function<void()>> works;
  for (const Mix mix : kMixes) works.push_back([&, mix] { streams.run(mix, threads); });
  for (const Part& part : parts) works.push_back([&] { part.run(threads); });
  for (const auto& work : works) work();
  const auto spreads = interleave(works, {rounds, rounds, 0});

  std::printf("\n%d thread%s time, best of %lld rounds (median)\n\n", threads,
              threads == 1 ? ", processor" : "s, wall", static_cast<long long>(rounds));
  print_head({"loop", "GB/s:", ":"});
  // With more threads, nobody adds up the time of all of them.
  const auto time = threads == 1 ? &Interleaved::processor : &Interleaved::wall;
  const auto speed = [](double bytes, double milliseconds) { return bytes / milliseconds * 1e-6; };
  std::map<Mix, Spread> of_mix;
  for (size_t i = 0; i < std::size(kMixes); ++i) {
    const double bytes = streams.bytes(kMixes[i]);
    const Spread& spread = of_mix[kMixes[i]] = spreads[i].*time;
    print_row({name_of(kMixes[i]), format("%.1f", speed(bytes, spread.min)),
               format("(%.1f)", speed(bytes, spread.median))});
  }
  std::printf("\n");
  print_head({"kernel", "ms:", ":", "GB/s:", "of", "share:", ":"});
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const Spread& spread = spreads[std::size(kMixes) + i].*time;
    const double bytes = streams.bytes(part.mix);
    const auto share = [&](double Spread::*of) {
      return 100 * speed(part.bytes, spread.*of) / speed(bytes, of_mix[part.mix].*of);
    };
    print_row({part.name, format("%.1f", spread.min), format("(%.1f)", spread.median),
               format("%.1f", speed(part.bytes, spread.min)), name_of(part.mix),
               format("%.0f %%", share(&Spread::min)), format("(%.0f %%)", share(&Spread::median))});
  }
}

int run(const examples::OptionValues& given) {
  const int64_t rounds = number_in(given, "rounds");
  Streams streams(int64_t{64} << 20);
  std::vector<Part> parts = make_parts();
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  measure(parts, streams, 1, rounds);
  if (all > 1) measure(parts, streams, all, rounds);
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand cpu{"cpu", "kernels of the norm and the compressed step beside loops over as many streams",
                 kAbout, run};
  cpu.options.add_options()("rounds", whole_number(15), "in which each takes its turn");
  cpu.without_dashes = "rounds";
  return cpu;
}

}  // namespace bench::cpu
