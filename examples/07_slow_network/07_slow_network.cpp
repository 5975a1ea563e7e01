// The step time of optimizers whose ranks talk over a slow network: FusedAdamW with gradients averaged in
// fp32 or bf16, and OneBitAdam after its freeze. slow_network.py beside this file makes such a network out of
// one Linux machine and starts this program in it:
//
//   sudo examples/07_slow_network/slow_network.py --model small
//
// Between hosts that really are apart, a launcher starts it; --gbit says what their links carry:
//
//   torchrun --no-python --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:PORT
//       07_slow_network --gbit 1 --csv a.csv                                         // in the same line
//   07_slow_network --report a.csv
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <pacer/core/error.h>

#include "measurements.h"
#include "steps.h"
#include "support/command_line.h"
#include "support/processes.h"
#include "support/program.h"
#include "support/whole_file.h"

namespace {

namespace po = boost::program_options;

constexpr std::chrono::minutes kDeadline(5);  // slow links carry the largest model for a minute

struct Options {
  std::string model, csv, report;
  bool cuda = false;
  std::vector<std::string> optimizers;
  double gbit = 0, seconds = 0;
  int processes = 0;
};

po::options_description description() {
  po::options_description all = examples::make_options();
  const auto word = [](const char* name) { return po::value<std::string>()->value_name(name); };
  all.add_options()                                                                                   //
      ("model", word("gpt2|bert-large|small")->default_value("small"), "whose parameters there are")  //
      ("device", word("cpu|cuda")->default_value("cpu"),
       "cpu: ranks joined by Gloo; cuda: by NCCL, one GPU a rank")  //
      ("optimizers", word("LIST")->default_value("fp32,bf16,onebit"),
       "fp32, bf16: FusedAdamW, gradients averaged in that type; lamb, muon: FusedLamb, Muon, in fp32; "
       "onebit, "
       "onebit-lamb, onebit-muon: OneBitAdam, OneBitLamb, OneBitMuon; onebit-nodes, onebit-lamb-nodes: the "
       "same between hosts; "
       "onebit-buckets, onebit-lamb-buckets: in buckets of 25 MiB; shards, shards-nodes, shards-blocks: "
       "FusedAdamW with state and gradients, or parameters too, in parts over all ranks or those of a host, "
       "with a backward that adds them up")  //
      ("seconds", po::value<double>()->value_name("S")->default_value(10),
       "to measure each optimizer for; at least three steps")  //
      ("processes", po::value<int>()->value_name("N")->default_value(1),
       "ranks to start on this machine; leave it out where they are started already")  //
      ("gbit", po::value<double>()->value_name("GBIT")->default_value(0),
       "what a link carries each way, in Gbit/s; 0: as fast as it goes")      //
      ("csv", word("FILE")->default_value(""), "to add the measurements to")  //
      ("report", word("FILE")->default_value(""),
       "measures nothing: shows the tables of such a file and draws charts beside it");
  return all;
}

std::optional<Options> read_options(int argument_count, char** arguments) {
  const auto read = examples::read_command_line(
      argument_count, arguments,
      "Measures the step of optimizers over a network; slow_network.py makes a slow one.\n", description());
  if (!read) return std::nullopt;
  const examples::OptionValues& given = *read;
  Options options;
  const auto word = [&](const char* name) { return given[name].as<std::string>(); };
  options.model = word("model");
  options.cuda = examples::choice_of<bool>(given, "device", {{"cpu", false}, {"cuda", true}});
  options.csv = word("csv");
  options.report = word("report");
  options.optimizers = examples::split(word("optimizers"));
  options.gbit = examples::value_in<double>(given, "gbit", 0, 1e6);
  options.seconds = examples::value_in<double>(given, "seconds", 1e-3, 3600);
  options.processes = examples::value_in<int>(given, "processes", 1, 1024);
  slow_network::model_named(options.model);
  pacer::require(!options.optimizers.empty(), "--optimizers names none; --help says which there are");
  for (const std::string& name : options.optimizers) slow_network::title_of(name);  // throws
  return options;
}

void measure(const std::shared_ptr<pacer::Communicator>& world, const Options& options) {
  pacer::require(
      world->world_size() > 1,
      "a single rank sends nothing; start several with --processes N, slow_network.py or a launcher");
  const slow_network::Model model = slow_network::model_named(options.model);
  if (world->rank() == 0) {
    std::printf("%s, %.1f M parameters, %d ranks over %s, ", model.name.c_str(),
                static_cast<double>(model.parameters()) / 1e6, world->world_size(),
                world->backend_name().c_str());
    if (options.gbit > 0) {
      std::printf("links of %g Gbit/s\n", options.gbit);
    } else {
      std::printf("links as fast as they go\n");
    }
  }
  for (const std::string& name : options.optimizers) {
    // One after the other: several would not fit into memory at once.
    constexpr int64_t kLeast = 3, kMost = 200;
    collectives::Way way = slow_network::make_step(name, model, world);
    int64_t runs = 0;
    way.run = [&runs, step = way.run] {
      ++runs;
      step();
    };
    const bool shares_link = world->local_size() > 1 && world->local_size() < world->world_size();
    const int64_t before = shares_link ? slow_network::bytes_over_link() : 0;
    const auto timing = collectives::measure(*world, {way}, {options.seconds, kLeast, kMost})[0];
    if (world->rank() != 0) continue;
    const int64_t bytes =
        shares_link ? (slow_network::bytes_over_link() - before) / runs : timing.busiest_bytes;
    const slow_network::Measurement entry{model.name,
                                          slow_network::title_of(name),
                                          world->backend_name(),
                                          world->world_size(),
                                          options.gbit,
                                          timing.slowest * 1e3,
                                          bytes,
                                          timing.repetitions};
    std::printf("  %-20s %10.1f ms/step %10.2f MB sent per %s, %lld steps\n", entry.optimizer.c_str(),
                entry.milliseconds, static_cast<double>(entry.bytes_sent) / 1e6,
                shares_link ? "host" : "rank", static_cast<long long>(entry.steps));
    std::fflush(stdout);
    if (!options.csv.empty()) slow_network::append(options.csv, {entry});
  }
  world->barrier();
}

void report(const std::string& path) {
  const auto measurements = slow_network::read_measurements(path);
  std::fputs(slow_network::as_tables(measurements).c_str(), stdout);
  std::set<int64_t> ranks;
  for (const auto& entry : measurements) ranks.insert(entry.ranks);
  for (const int64_t count : ranks) {
    const std::string chart = slow_network::as_chart(measurements, count);
    if (chart.empty()) continue;
    const std::string target =
        path.substr(0, path.rfind(".csv")) + "-" + std::to_string(count) + "-ranks.svg";
    examples::write_whole_file(target, chart);
    std::printf("Chart: %s\n", target.c_str());
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  std::shared_ptr<pacer::Communicator> world;
  const auto run = [&] {
    const auto options = read_options(argument_count, arguments);
    if (!options) return 0;
    if (!options->report.empty()) {
      report(options->report);
      return 0;
    }
    if (const auto exit_code = examples::run_processes(options->processes, arguments)) return *exit_code;
    const auto backend = options->cuda ? pacer::CommunicatorBackend::nccl : pacer::CommunicatorBackend::gloo;
    world = examples::join_processes(pacer::CommunicatorOptions().backend(backend).timeout(kDeadline));
    measure(world, *options);
    return 0;
  };
  return examples::run_guarded("07_slow_network", run, [&](const std::string& sentence) {
    if (world != nullptr) world->leave(sentence);
  });
}
