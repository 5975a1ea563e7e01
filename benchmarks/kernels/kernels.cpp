// Chooses cases, runs them, reports.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <pacer/core/error.h>

#include "cases.h"
#include "report.h"
#include "runs.h"
#include "subcommands.h"

namespace bench::kernels {
namespace {

constexpr const char* kAbout =
    R"(Measures pacer's optimizers, LibTorch's own beside them, and the memory bandwidth of the machine in
the same run. Exit code 1 also where a case failed or a result was wrong.
)";

// `device`: none for the GPU where there is one, else the CPU.
std::vector<Case> chosen_cases(const std::string& filter, std::optional<Device> device, bool quick,
                               bool list) {
  std::vector<Case> cases = all_cases();
  const auto drop = [&](auto unwanted) {
    cases.erase(std::remove_if(cases.begin(), cases.end(), unwanted), cases.end());
  };
  std::vector<std::string> names;
  for (const auto& which : cases) names.push_back(which.name);
  drop([&](const Case& which) { return which.name.find(filter) == std::string::npos; });
  const std::string nearest = examples::nearest_name(filter, names);
  pacer::require(!cases.empty(), "no case has '", examples::shown(filter), "' in its name; ",
                 nearest.empty() ? "" : "did you mean '" + nearest + "'? ", "--list prints all");
  if (list) return cases;

  const std::string obstacle = device == Device::cpu ? "" : obstacle_to_cuda();
  pacer::require(device != Device::cuda || obstacle.empty(), "--device cuda cannot be used: ", obstacle);
  if (!device) device = obstacle.empty() ? Device::cuda : Device::cpu;
  drop([&](const Case& which) { return which.device != *device; });
  pacer::require(!cases.empty(), "no case for the ", device == Device::cuda ? "GPU" : "CPU", " has '", filter,
                 "' in its name; choose another --filter or --device");
  if (quick) drop([](const Case& which) { return !which.quick; });
  pacer::require(!cases.empty(),
                 "--quick leaves none of the chosen cases; leave it out or choose another --filter");
  return cases;
}

int run(const examples::OptionValues& given) {
  const bool list = given.count("list") != 0;
  const auto device = examples::choice_of<std::optional<Device>>(
      given, "device", {{"auto", std::nullopt}, {"cpu", Device::cpu}, {"cuda", Device::cuda}});
  Effort effort;
  effort.quick = given.count("quick") != 0;
  effort.threads = examples::value_in<int>(given, "threads", 1, 4096, 0);
  effort.repetitions = examples::value_in<int64_t>(given, "repetitions", 1, 1'000'000, 0);
  const auto cases = chosen_cases(given["filter"].as<std::string>(), device, effort.quick, list);
  if (list) {
    for (const auto& which : cases) std::printf("%s%s\n", which.name.c_str(), which.quick ? "  (quick)" : "");
    return 0;
  }
  Report report(given["json"].as<std::string>());
  auto facts = environment_facts();
  const bool on_gpu = cases.front().device == Device::cuda;
  if (on_gpu) {
    for (auto& fact : gpu_facts()) facts.push_back(fact);
  }
  report.environment(facts);
  if (on_gpu) {
    run_on_cuda(cases, effort, report);
  } else {
    run_on_cpu(cases, effort, report);
  }
  report.print_tables();
  return report.all_well() ? 0 : 1;
}

}  // namespace

Subcommand subcommand() {
  Subcommand kernels{"kernels", "optimizer steps beside LibTorch's own and the machine's copy bandwidth",
                     kAbout, run};
  kernels.options.add_options()                                                                     //
      ("list", "print the names of the cases and end")                                              //
      ("filter", word("SUBSTRING")->default_value("", "all"), "only cases whose name contains it")  //
      ("device", word("cpu|cuda|auto")->default_value("auto"),
       "auto: the GPU where there is one, else the CPU")  //
      ("threads", po::value<int>()->value_name("N"),
       "CPU cases with N threads; without it with one thread and with all")  //
      ("repetitions", whole_number(),
       "measurements per number (25 on a GPU, 15 on a CPU), of which the median counts")  //
      ("quick", "fewer cases and measurements; under a minute")                           //
      ("json", word("FILE")->default_value("", "none"),
       "also write every number to it, one JSON object per line");
  return kernels;
}

}  // namespace bench::kernels
