#include "arguments.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include <pacer/core/error.h>

namespace bench {
namespace {

// Insertions, deletions and replacements cost one each.
size_t edit_distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

int64_t positive_number(const std::string& flag, const std::string& text, int64_t most) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  pacer::require(error == std::errc() && stopped == end && value >= 1 && value <= most, flag,
                 " wants a whole number from 1 to ", most, ", not '", text, "'");
  return value;
}

DeviceChoice device_choice(const std::string& text) {
  if (text == "auto") return DeviceChoice::automatic;
  if (text == "cpu") return DeviceChoice::cpu;
  if (text == "cuda") return DeviceChoice::cuda;
  throw pacer::InvalidArgument("--device wants cpu, cuda or auto, not '" + text + "'; did you mean '" +
                               nearest_name(text, {"cpu", "cuda", "auto"}) + "'?");
}

}  // namespace

const char* const kHelp =
    R"(pacer-bench measures pacer's optimizers, LibTorch's own beside them, and the memory bandwidth of the machine in the
same run.

  --list               print the names of the cases and end
  --filter SUBSTRING   only cases whose name contains SUBSTRING
  --device DEVICE      cpu, cuda, or auto (default): the GPU where there is one, else the CPU
  --threads N          CPU cases with N threads; without it with one thread and with all
  --repetitions N      measurements per number (default: 25 on a GPU, 15 on a CPU, of which the median counts)
  --quick              fewer cases and measurements; under a minute
  --json FILE          also write every number to FILE, one JSON object per line
  --help               this text

Exit code: 0 when every case ran, 1 when one failed or a result was wrong, 2 for a mistake on the command line.
)";

std::string nearest_name(const std::string& typed, const std::vector<std::string>& names) {
  return *std::min_element(names.begin(), names.end(),
                           [&](const std::string& left, const std::string& right) {
                             return edit_distance(typed, left) < edit_distance(typed, right);
                           });
}

Arguments parse_arguments(const std::vector<std::string>& words) {
  static const std::vector<std::string> kFlags = {"--list",        "--filter", "--device", "--threads",
                                                  "--repetitions", "--quick",  "--json",   "--help"};
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    // Both spellings: --flag value and --flag=value.
    const size_t equals = words[i].find('=');
    const std::string flag = words[i].substr(0, equals);
    const bool has_value = equals != std::string::npos;
    const bool takes_value = flag == "--filter" || flag == "--device" || flag == "--threads" ||
                             flag == "--repetitions" || flag == "--json";
    pacer::require(std::find(kFlags.begin(), kFlags.end(), flag) != kFlags.end(), "unknown option '", flag,
                   "'; did you mean '", nearest_name(flag, kFlags), "'?");
    pacer::require(takes_value || !has_value, flag, " takes no value");
    pacer::require(!takes_value || has_value || i + 1 < words.size(), flag, " wants a value");
    std::string value;
    if (takes_value) value = has_value ? words[i].substr(equals + 1) : words[++i];

    if (flag == "--help") arguments.help = true;
    if (flag == "--list") arguments.list = true;
    if (flag == "--quick") arguments.quick = true;
    if (flag == "--filter") arguments.filter = value;
    if (flag == "--device") arguments.device = device_choice(value);
    if (flag == "--threads") arguments.threads = static_cast<int>(positive_number(flag, value, 4096));
    if (flag == "--repetitions") arguments.repetitions = positive_number(flag, value, 1'000'000);
    if (flag == "--json") {
      pacer::require(!value.empty(), "--json wants the path of a file");
      arguments.json = value;
    }
  }
  return arguments;
}

}  // namespace bench
