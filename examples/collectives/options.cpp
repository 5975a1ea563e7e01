// Boost.Program_options does the splitting; ranges are checked here. No other file includes Boost.
#include "options.h"

#include <iostream>

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "convergence/nearest_name.h"

namespace collectives {
namespace {

namespace po = boost::program_options;

po::options_description description() {
  constexpr unsigned kColumns = 104, kHelpColumns = 72;
  po::options_description all("Options", kColumns, kHelpColumns);
  const auto number = [](const char* name) { return po::value<int64_t>()->value_name(name); };
  all.add_options()  //
      ("processes", number("N"),
       "ranks to start on this machine (4); leave it out under torchrun or mpirun")                     //
      ("threads", "the ranks are threads of this process: needs no network, shows no network's times")  //
      ("device", po::value<std::string>()->value_name("cpu|cuda")->default_value("cpu"),
       "cpu: ranks joined by Gloo; cuda: by NCCL, one GPU a rank")  //
      ("measure", po::value<std::string>()->value_name("all|exchange|step")->default_value("all"),
       "the exchange alone, training steps, or both")  //
      ("rate", po::value<double>()->value_name("GBIT"),
       "what a rank's link carries each way, in Gbit/s: adds the ratio to the least time possible")  //
      ("layers", number("N"), "of the trained network (12)")                                         //
      ("width", number("N"), "of the trained network (512)")                                         //
      ("rows", number("N"),
       "of a rank's batch; left out: so many that backward takes as long as an exchange")  //
      ("layer-ms", po::value<double>()->value_name("MS"),
       "each layer also sleeps, so long in forward and twice as long in backward, as the host of an "
       "accelerator does: shows overlap where processors are scarce")  //
      ("seconds", po::value<double>()->value_name("S"),
       "to measure each size for (8), and the training step for three times as long; every scheme runs at "
       "least three times")                                                        //
      ("quick", "small sizes and a small network: under 20 seconds on two cores")  //
      ("output", po::value<std::string>()->value_name("FOLDER")->default_value("run/collectives"),
       "for measurements.csv, exchange.svg and step.svg")  //
      ("help,h", "this text");
  return all;
}

po::variables_map parse(int argument_count, char** arguments, const po::options_description& known) {
  namespace style = po::command_line_style;
  po::variables_map given;
  try {
    const auto parsed = po::command_line_parser(argument_count, arguments)
                            .options(known)
                            .positional(po::positional_options_description())
                            .style(style::unix_style & ~style::allow_guessing)
                            .run();
    po::store(parsed, given);
  } catch (const po::unknown_option& error) {
    const std::string typed = error.get_option_name();
    std::vector<std::string> names;
    for (const auto& option : known.options()) names.push_back("--" + option->long_name());
    throw pacer::InvalidArgument("unknown option '" + typed + "'; " + convergence::suggestion(typed, names));
  } catch (const po::too_many_positional_options_error&) {
    throw pacer::InvalidArgument(
        "options start with two dashes and there is nothing else; --help lists them");
  } catch (const po::error& error) {
    throw pacer::InvalidArgument(std::string(error.what()) + " (on the command line)");
  }
  return given;
}

// The value of an option, inside its range, or `otherwise`.
template <class Value>
Value value_of(const po::variables_map& given, const std::string& name, Value otherwise, Value least,
               Value most) {
  if (given.count(name) == 0) return otherwise;
  const auto value = given[name].as<Value>();
  pacer::require(value >= least && value <= most, "--", name, " must be from ", least, " to ", most, ", not ",
                 value);
  return value;
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
  const auto known = description();
  const auto given = parse(argument_count, arguments, known);
  if (given.count("help") != 0) {
    std::cout
        << "Adds gradients over ranks in six ways, from a parameter server to buckets that travel while\n"
           "backward runs, checks that the sums agree, and measures each: the exchange alone, and in\n"
           "training steps. docs/collectives.md explains the schemes and shows results.\n\n"
           "  pacer-collectives --quick                       a first look\n"
           "  pacer-collectives --processes 4                 four processes on this machine, over loopback\n"
           "  torchrun --no-python --nproc-per-node 4 pacer-collectives --device cuda\n\n"
        << known;
    return std::nullopt;
  }
  const bool quick = given.count("quick") != 0;
  Options options;
  options.threads = given.count("threads") != 0;
  options.processes = static_cast<int>(value_of<int64_t>(given, "processes", 0, 1, 1024));
  options.layers = value_of<int64_t>(given, "layers", quick ? 4 : 12, 1, 1000);
  options.width = value_of<int64_t>(given, "width", quick ? 192 : 512, 1, 65536);
  options.rows = value_of<int64_t>(given, "rows", 0, 1, 1 << 20);
  options.layer_seconds = 1e-3 * value_of<double>(given, "layer-ms", 0, 1e-3, 1e5);
  options.rate = 1e9 * value_of<double>(given, "rate", 0, 1e-6, 1e6);
  options.output = given["output"].as<std::string>();
  pacer::require(!options.output.empty(), "--output needs a folder; it is empty");
  const auto device = given["device"].as<std::string>();
  pacer::require(device == "cpu" || device == "cuda", "--device must be cpu or cuda, not '", device, "'");
  options.cuda = device == "cuda";
  pacer::require(!options.cuda || !options.threads,
                 "--threads joins ranks on the CPU only; leave out --device cuda");
  const auto measure = given["measure"].as<std::string>();
  pacer::require(measure == "all" || measure == "exchange" || measure == "step",
                 "--measure must be all, exchange or step, not '", measure, "'");
  options.exchange = measure != "step";
  options.step = measure != "exchange";
  choose_sizes(options, quick, value_of<double>(given, "seconds", quick ? 0.5 : 8, 0.01, 3600));
  return options;
}

}  // namespace collectives
