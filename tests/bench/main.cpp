// pacer-bench: chooses cases, runs them, reports. Exit codes: 0 well, 1 a case failed, 2 wrong arguments.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <pacer/core/error.h>

#include "arguments.h"
#include "cases.h"
#include "cpu_cases.h"
#include "cuda_cases.h"
#include "environment.h"
#include "report.h"

namespace bench {
namespace {

std::vector<Case> chosen_cases(const Arguments& arguments) {
  std::vector<Case> cases = all_cases();
  const auto drop = [&](auto unwanted) {
    cases.erase(std::remove_if(cases.begin(), cases.end(), unwanted), cases.end());
  };
  std::vector<std::string> names;
  for (const auto& which : cases) names.push_back(which.name);
  drop([&](const Case& which) { return which.name.find(arguments.filter) == std::string::npos; });
  pacer::require(!cases.empty(), "no case has '", arguments.filter, "' in its name; did you mean '",
                 nearest_name(arguments.filter, names), "'? (--list prints all)");
  if (arguments.list) return cases;

  const std::string obstacle = arguments.device == DeviceChoice::cpu ? "" : obstacle_to_cuda();
  pacer::require(arguments.device != DeviceChoice::cuda || obstacle.empty(),
                 "--device cuda cannot be used: ", obstacle);
  const bool on_gpu = arguments.device == DeviceChoice::cuda ||
                      (arguments.device == DeviceChoice::automatic && obstacle.empty());
  drop([&](const Case& which) { return (which.device == Device::cuda) != on_gpu; });
  pacer::require(!cases.empty(), "no case for the ", on_gpu ? "GPU" : "CPU", " has '", arguments.filter,
                 "' in its name; choose another --filter or --device");
  if (arguments.quick) drop([](const Case& which) { return !which.quick; });
  pacer::require(!cases.empty(),
                 "--quick leaves none of the chosen cases; leave it out or choose another --filter");
  return cases;
}

int run(const Arguments& arguments) {
  const std::vector<Case> cases = chosen_cases(arguments);
  if (arguments.list) {
    for (const auto& which : cases) std::printf("%s%s\n", which.name.c_str(), which.quick ? "  (quick)" : "");
    return 0;
  }
  Report report(arguments.json);
  auto facts = environment_facts();
  if (cases.front().device == Device::cuda) {
    for (auto& fact : gpu_facts()) facts.push_back(fact);
  }
  report.environment(facts);
  if (cases.front().device == Device::cuda) {
    run_on_cuda(cases, arguments, report);
  } else {
    run_on_cpu(cases, arguments, report);
  }
  report.print_tables();
  return report.all_well() ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    const bench::Arguments arguments = bench::parse_arguments({argv + 1, argv + argc});
    if (arguments.help) {
      std::fputs(bench::kHelp, stdout);
      return 0;
    }
    return bench::run(arguments);
  } catch (const pacer::InvalidArgument& error) {
    std::fprintf(stderr, "pacer-bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pacer-bench: %s\n", error.what());
    return 1;
  }
}
