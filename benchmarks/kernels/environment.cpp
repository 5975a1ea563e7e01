#include <ctime>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/version.h>

#include "runs.h"
#include "support/value_in_file.h"  // of examples/

namespace bench::kernels {
namespace {

std::string cpu_model() {
  const std::string name = examples::value_in_file("/proc/cpuinfo", "model name");
  return name.empty() ? "unknown" : name;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> environment_facts() {
#ifdef PACER_COMMIT
  const std::string commit = PACER_COMMIT;
#else
  const std::string commit = "unknown";
#endif
  return {{"date", utc_now()},
          {"commit", commit},
          {"torch", TORCH_VERSION},
          {"compiler", __VERSION__},
          {"cpu", cpu_model()},
          {"threads", std::to_string(std::thread::hardware_concurrency()) + " of the machine, " +
                          std::to_string(at::get_num_threads()) + " of LibTorch"}};
}

}  // namespace bench::kernels
