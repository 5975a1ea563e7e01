// Ranges are checked here.
#include "options.h"

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "support/command_line.h"

namespace collectives {
namespace {

namespace po = boost::program_options;

po::options_description description() {
  const auto number = [](const char* name) { return po::value<int64_t>()->value_name(name); };
  auto ranks = examples::make_options("Ranks");
  ranks.add_options()  //
      ("processes", number("N"),
       "ranks to start on this machine (4); leave it out under torchrun or mpirun")                     //
      ("threads", "the ranks are threads of this process: needs no network, shows no network's times")  //
      ("device", po::value<std::string>()->value_name("cpu|cuda")->default_value("cpu"),
       "cpu: ranks joined by Gloo; cuda: by NCCL, one GPU a rank");
  auto measurements = examples::make_options("Measurements");
  measurements.add_options()  //
      ("measure", po::value<std::string>()->value_name("all|exchange|step|bubble")->default_value("all"),
       "the exchange alone, training steps, the bubble of a pipeline, or all of them")  //
      ("quick", "small sizes and a small network: under 20 seconds on two cores")       //
      ("seconds", po::value<double>()->value_name("S"),
       "to measure each size for (8), and the training step for three times as long; every scheme runs at "
       "least three times")  //
      ("rate", po::value<double>()->value_name("GBIT"),
       "what a rank's link carries each way, in Gbit/s: adds the ratio to the least time possible")  //
      ("output", po::value<std::string>()->value_name("FOLDER")->default_value("run/collectives"),
       "for measurements.csv, bubble.csv and charts");
  auto network = examples::make_options("The trained network");
  network.add_options()                            //
      ("layers", number("N"), "its layers (12)")   //
      ("width", number("N"), "their width (512)")  //
      ("rows", number("N"),
       "of a rank's batch; left out: so many that backward takes as long as an exchange")  //
      ("layer-ms", po::value<double>()->value_name("MS"),
       "each layer also sleeps, so long in forward and twice as long in backward, as the host of an "
       "accelerator does: shows overlap where processors are scarce");
  auto pipeline = examples::make_options("The simulated pipeline");
  pipeline.add_options()                         //
      ("stages", number("P"), "its stages (4)")  //
      ("message", po::value<double>()->value_name("SHARE"),
       "of a forward pass, that a slow message of this pipeline takes (0.1)");
  auto all = examples::make_options({});
  all.add(ranks).add(measurements).add(network).add(pipeline);
  return all;
}

void choose_sizes(Options& options, bool quick, double seconds) {
  constexpr int64_t kOftenEnough = 40;
  if (quick) {
    options.sizes = {{10'000, 4}, {1'000'000, 30}};
  } else {
    options.sizes = {{10'000, 4}, {100'000, 10}, {1'000'000, 40}, {10'000'000, 100}, {30'000'000, 150}};
  }
  options.exchange_patience = {seconds, 3, kOftenEnough};
  options.step_patience = {3 * seconds, 3, kOftenEnough};
}

}  // namespace

std::optional<Options> read_options(int argument_count, char** arguments) {
  const auto read = examples::read_command_line(
      argument_count, arguments,
      "Adds gradients over ranks in six ways, from a parameter server to buckets that travel while\n"
      "backward runs, checks that the sums agree, and measures each: the exchange alone, and in\n"
      "training steps. Then it simulates the bubble of a pipeline. docs/collectives.md explains the\n"
      "schemes, and docs/measurements/collectives.md has results.\n\n"
      "  pacer-collectives --quick                       a first look\n"
      "  pacer-collectives --processes 4                 four processes on this machine, over loopback\n"
      "  torchrun --no-python --nproc-per-node 4 pacer-collectives --device cuda\n",
      description());
  if (!read) return std::nullopt;
  const examples::OptionValues& given = *read;
  const bool quick = given.count("quick") != 0;
  Options options;
  options.threads = given.count("threads") != 0;
  options.processes = static_cast<int>(examples::value_in<int64_t>(given, "processes", 1, 1024, 0));
  options.layers = examples::value_in<int64_t>(given, "layers", 1, 1000, quick ? 4 : 12);
  options.width = examples::value_in<int64_t>(given, "width", 1, 65536, quick ? 192 : 512);
  options.rows = examples::value_in<int64_t>(given, "rows", 1, 1 << 20, 0);
  options.layer_seconds = 1e-3 * examples::value_in<double>(given, "layer-ms", 1e-3, 1e5, 0);
  options.rate = 1e9 * examples::value_in<double>(given, "rate", 1e-6, 1e6, 0);
  options.output = given["output"].as<std::string>();
  pacer::require(!options.output.empty(), "--output needs a folder; it is empty");
  options.cuda = examples::choice_of<bool>(given, "device", {{"cpu", false}, {"cuda", true}});
  pacer::require(!options.cuda || !options.threads,
                 "--threads joins ranks on the CPU only; leave out --device cuda");
  enum class Measure { all, exchange, step, bubble };
  const auto measure = examples::choice_of<Measure>(given, "measure",
                                                    {{"all", Measure::all},
                                                     {"exchange", Measure::exchange},
                                                     {"step", Measure::step},
                                                     {"bubble", Measure::bubble}});
  options.exchange = measure == Measure::all || measure == Measure::exchange;
  options.step = measure == Measure::all || measure == Measure::step;
  options.bubble = measure == Measure::all || measure == Measure::bubble;
  options.pipeline.stages = examples::value_in<int64_t>(given, "stages", 2, 128, options.pipeline.stages);
  options.pipeline.message =
      examples::value_in<double>(given, "message", 1e-6, 1e3, options.pipeline.message);
  choose_sizes(options, quick, examples::value_in<double>(given, "seconds", 0.01, 3600, quick ? 0.5 : 8));
  return options;
}

}  // namespace collectives
