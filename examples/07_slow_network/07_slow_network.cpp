// The step time of optimizers whose ranks talk over a slow network: FusedAdamW with gradients averaged in
// fp32 or bf16, and OneBitAdam after its freeze. slow_network.py beside this file makes such a network out of
// one Linux machine and starts this program in it:
//
//   sudo examples/07_slow_network/slow_network.py --model small
//
// Between hosts that really are apart, a launcher starts it; --gbit says what their links carry:
//
//   torchrun --no-python --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:PORT 07_slow_network --gbit 1
//   --csv a.csv 07_slow_network --report a.csv
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "convergence/nearest_name.h"
#include "measurements.h"
#include "steps.h"
#include "support/processes.h"

namespace {

namespace po = boost::program_options;

constexpr int kFailed = 1, kBadInput = 2;
constexpr std::chrono::minutes kDeadline(5);  // slow links carry the largest model for a minute

struct Options {
  std::string model, device, csv, report;
  std::vector<std::string> optimizers;
  double gbit = 0, seconds = 0;
  int processes = 0;
};

po::options_description description() {
  constexpr unsigned kColumns = 104, kHelpColumns = 72;
  po::options_description all("Options", kColumns, kHelpColumns);
  const auto word = [](const char* name) { return po::value<std::string>()->value_name(name); };
  all.add_options()                                                                                   //
      ("model", word("gpt2|bert-large|small")->default_value("small"), "whose parameters there are")  //
      ("device", word("cpu|cuda")->default_value("cpu"),
       "cpu: ranks joined by Gloo; cuda: by NCCL, one GPU a rank")  //
      ("optimizers", word("LIST")->default_value("fp32,bf16,onebit"),
       "fp32, bf16: FusedAdamW, gradients averaged in that type; lamb: FusedLamb, in fp32; onebit, "
       "onebit-lamb: OneBitAdam, OneBitLamb; onebit-nodes, onebit-lamb-nodes: the same between hosts")  //
      ("seconds", po::value<double>()->value_name("S")->default_value(10),
       "to measure each optimizer for; at least three steps")  //
      ("processes", po::value<int>()->value_name("N")->default_value(1),
       "ranks to start on this machine; leave it out where they are started already")  //
      ("gbit", po::value<double>()->value_name("GBIT")->default_value(0),
       "what a link carries each way, in Gbit/s; 0: as fast as it goes")      //
      ("csv", word("FILE")->default_value(""), "to add the measurements to")  //
      ("report", word("FILE")->default_value(""),
       "measures nothing: shows the tables of such a file and draws charts beside it")  //
      ("help,h", "this text");
  return all;
}

po::variables_map parse(int argument_count, char** arguments, const po::options_description& known) {
  po::variables_map given;
  try {
    namespace style = po::command_line_style;
    const auto parsed = po::command_line_parser(argument_count, arguments)
                            .options(known)
                            .positional(po::positional_options_description())
                            .style(style::unix_style & ~style::allow_guessing)
                            .run();
    po::store(parsed, given);
  } catch (const po::unknown_option& error) {
    std::vector<std::string> names;
    for (const auto& option : known.options()) names.push_back("--" + option->long_name());
    throw pacer::InvalidArgument("unknown option '" + error.get_option_name() + "'; " +
                                 convergence::suggestion(error.get_option_name(), names));
  } catch (const po::error& error) {
    throw pacer::InvalidArgument(std::string(error.what()) + "; --help lists the options");
  }
  return given;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');) items.push_back(item);
  return items;
}

std::optional<Options> read_options(int argument_count, char** arguments) {
  const auto known = description();
  const auto given = parse(argument_count, arguments, known);
  if (given.count("help") != 0) {
    std::cout << "Measures the step of optimizers over a network; slow_network.py makes a slow one.\n\n"
              << known;
    return std::nullopt;
  }
  Options options;
  const auto word = [&](const char* name) { return given[name].as<std::string>(); };
  options.model = word("model");
  options.device = word("device");
  options.csv = word("csv");
  options.report = word("report");
  options.optimizers = split(word("optimizers"));
  options.gbit = given["gbit"].as<double>();
  options.seconds = given["seconds"].as<double>();
  options.processes = given["processes"].as<int>();
  slow_network::model_named(options.model);
  pacer::require(options.device == "cpu" || options.device == "cuda", "--device must be cpu or cuda, not '",
                 options.device, "'");
  pacer::require(options.gbit >= 0 && options.gbit <= 1e6, "--gbit must be from 0 to 1e6, not ",
                 options.gbit);
  pacer::require(options.seconds > 0 && options.seconds <= 3600,
                 "--seconds must be above 0 and at most 3600, not ", options.seconds);
  pacer::require(options.processes >= 1 && options.processes <= 1024,
                 "--processes must be from 1 to 1024, not ", options.processes);
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
    std::ofstream file(target, std::ios::binary);
    file << chart;
    file.close();
    pacer::require<pacer::FileError>(!file.fail(), "cannot write ", target);
    std::printf("Chart: %s\n", target.c_str());
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  std::shared_ptr<pacer::Communicator> world;
  const auto complain = [&](const std::exception& error, int exit_code) {
    if (world != nullptr) world->leave(error.what());
    std::fflush(stdout);
    std::fprintf(stderr, "07_slow_network: %s\n", error.what());
    return exit_code;
  };
  try {
    const auto options = read_options(argument_count, arguments);
    if (!options) return 0;
    if (!options->report.empty()) {
      report(options->report);
      return 0;
    }
    if (const auto exit_code = examples::run_processes(options->processes, arguments)) return *exit_code;
    const auto backend = options->device == "cuda" ? pacer::Backend::nccl : pacer::Backend::gloo;
    world = examples::join_processes(pacer::CommunicatorOptions().backend(backend).timeout(kDeadline));
    measure(world, *options);
    return 0;
  } catch (const pacer::CommunicationError& error) {
    return complain(error, examples::kPeersFailed);
  } catch (const pacer::InvalidArgument& error) {
    return complain(error, kBadInput);
  } catch (const std::exception& error) {
    return complain(error, kFailed);
  }
}
