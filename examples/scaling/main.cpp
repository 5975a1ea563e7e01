// pacer-scaling: how long a step takes on 1 to 1,024 ranks with each way to exchange gradients, by a model of
// measured kernels and links. Exit codes: 0 for success, 1 where a file cannot be read or written, 2 for
// input that cannot work.
#include <cstdio>
#include <string>
#include <vector>

#include <boost/program_options.hpp>

#include "measured.h"
#include "report.h"
#include "support/command_line.h"
#include "support/program.h"
#include "support/svg.h"

namespace {

namespace po = boost::program_options;
using namespace scaling;

po::options_description known_options() {
  auto known = examples::make_options();
  const auto word = [](const char* name) { return po::value<std::string>()->value_name(name); };
  const auto number = [](const char* name) { return po::value<double>()->value_name(name); };
  const auto count = [](const char* name) { return po::value<int64_t>()->value_name(name); };
  known.add_options()  //
      ("model", word("gpt2|gpt2-xl|bert-large|N")->default_value("bert-large"),
       "or its number of parameters, 7e9 for example")                                    //
      ("dtype", word("fp32|bf16")->default_value("fp32"), "of parameters and gradients")  //
      ("rule", word("adamw|lamb")->default_value("adamw"), "of the optimizer")            //
      ("compute-ms", number("MS")->default_value(0, "0"),
       "forward and backward of a rank's own batch; 0: an optimizer's step alone")  //
      ("warm-up", number("SHARE")->default_value(0.2, "0.2"),
       "of a run's steps that 1-bit optimizers take in full precision")                                //
      ("warm-up-wire", word("fp32|bf16")->default_value("fp32"), "as what gradients travel in those")  //
      ("refresh-every", count("N")->default_value(0),
       "steps between those in which they refresh the variance; 0: never")                        //
      ("machine", word("h200|h100|cpu")->default_value("h200"), "whose kernels and inner links")  //
      ("ranks-per-node", count("L")->default_value(8), "that share the link of a host")           //
      ("most", count("W")->default_value(1024), "ranks of the last row")                          //
      ("gbit", number("GBIT")->default_value(10, "10"), "per second of a host's link, each way")  //
      ("latency-us", number("US")->default_value(25, "25"), "of a message between hosts")         //
      ("efficiency", number("SHARE")->default_value(kTcpShare, "0.9564"),
       "of the host's link that protocols leave; the default is TCP's over Ethernet")  //
      ("node-gbs", number("GB/S")->default_value(0, "0"),
       "of a rank's link inside its host, each way; 0: the machine's")                                     //
      ("node-latency-us", number("US")->default_value(-1, "-1"), "of a message there; -1: the machine's")  //
      ("copy-gbs", number("GB/S")->default_value(0, "0"),
       "of a copy in the device's memory, read and written; 0: the machine's")  //
      ("measured", word("FILE"),
       "take copy and AdamW's kernel from what pacer-bench kernels --json wrote")  //
      ("json", "print one JSON object for each number of ranks and scheme")        //
      ("svg", word("FILE"), "draw the steps into this file")                       //
      ("compare", word("FILE"), "instead print steps of this CSV file, measured and by the model");
  return known;
}

Setting setting_of(const examples::OptionValues& given) {
  using examples::value_in;
  constexpr double kMostMs = 1e9, kMostGbs = 1e6;
  Setting setting;
  Workload& work = setting.work;
  work.parameters = parameters_of(given["model"].as<std::string>());
  work.dtype = examples::choice_of<Dtype>(given, "dtype", {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}});
  work.rule = examples::choice_of<Rule>(given, "rule", {{"adamw", Rule::adamw}, {"lamb", Rule::lamb}});
  work.block_scales = work.rule == Rule::adamw;  // as OneBitAdam and OneBitLamb have it
  const double compute = value_in<double>(given, "compute-ms", 0, kMostMs) * 1e-3;
  work.forward = compute * kForwardShare;
  work.backward = compute - work.forward;
  setting.warm_up.share = value_in<double>(given, "warm-up", 0, 1);
  setting.warm_up.refresh_every = value_in<int64_t>(given, "refresh-every", 0, 1'000'000);
  setting.warm_up.is_bf16 =
      examples::choice_of<bool>(given, "warm-up-wire", {{"fp32", false}, {"bf16", true}});
  setting.machine = machine_named(given["machine"].as<std::string>());
  if (given.count("measured") != 0) {
    setting.machine = with_kernels(setting.machine, given["measured"].as<std::string>());
  }
  if (const double copy = value_in<double>(given, "copy-gbs", 0, kMostGbs); copy > 0)
    setting.machine.copy = copy * 1e9;
  if (const double rate = value_in<double>(given, "node-gbs", 0, kMostGbs); rate > 0) {
    setting.machine.inside.rate = rate * 1e9;
  }
  if (const double latency = value_in<double>(given, "node-latency-us", -1, 1e6); latency >= 0) {
    setting.machine.inside.latency = latency * 1e-6;
  }
  const auto gbit = value_in<double>(given, "gbit", 1e-3, 1e5);
  setting.between = network_link(gbit, value_in<double>(given, "efficiency", 0.01, 1),
                                 value_in<double>(given, "latency-us", 0, 1e6));
  setting.ranks_per_node = value_in<int64_t>(given, "ranks-per-node", 1, 1024);
  char title[160];
  std::snprintf(title, sizeof title, "%s, %s, %s: hosts of %lld ranks (%s) on %g Gbit/s, %g ms of compute",
                given["model"].as<std::string>().c_str(), given["dtype"].as<std::string>().c_str(),
                given["rule"].as<std::string>().c_str(), static_cast<long long>(setting.ranks_per_node),
                setting.machine.name.c_str(), gbit, compute * 1e3);
  setting.title = title;
  return setting;
}

int run(int argument_count, char** arguments) {
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Says how long a training step takes on 1 to 1,024 ranks with each way to exchange gradients, which "
      "way\n"
      "is best, and what is sent. A model of measured kernels and links, not a measurement: docs/scaling.md\n"
      "says how far it is off. Each rank has a batch of its own, of the same size on any number of ranks.\n\n"
      "  pacer-scaling --model 7e9 --dtype bf16 --ranks-per-node 8 --gbit 100 --compute-ms 900\n",
      known_options());
  if (!given) return 0;
  if (given->count("compare") != 0) {
    std::fputs(comparison(read_measured((*given)["compare"].as<std::string>())).c_str(), stdout);
    return 0;
  }
  const Setting setting = setting_of(*given);
  std::vector<Row> rows;
  for (const int64_t ranks :
       usual_ranks(setting.ranks_per_node, examples::value_in<int64_t>(*given, "most", 1, 1'000'000))) {
    rows.push_back(row_of(setting.work, setting.machine, {ranks, setting.ranks_per_node, setting.between},
                          setting.warm_up));
  }
  const bool json = given->count("json") != 0;
  std::fputs((json ? json_lines(rows) : table(setting, rows)).c_str(), stdout);
  if (given->count("svg") != 0)
    examples::svg::save((*given)["svg"].as<std::string>(), drawing(setting, rows));
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("pacer-scaling", [&] { return run(argument_count, arguments); });
}
