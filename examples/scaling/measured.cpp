#include "measured.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

#include "support/nearest_name.h"

namespace scaling {
namespace {

constexpr const char* kColumns =
    "machine,model,rule,scheme,ranks,ranks_per_node,gbit,compute_ms,ranks_per_core,ms,use,source";
constexpr double kGoal = 0.1;

std::ifstream opened(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  pacer::require<pacer::FileError>(file.good() && file.peek() != std::ifstream::traits_type::eof(),
                                   "cannot read '", path, "'; it is missing, empty or not a file");
  return file;
}

Rule rule_named(const std::string& name) {
  if (name == "adamw") return Rule::adamw;
  if (name == "lamb") return Rule::lamb;
  pacer::require(name == "torch-adamw", "there is no rule '", name, "'; ",
                 examples::suggestion(name, {"adamw", "lamb", "torch-adamw"}));
  return Rule::torch_adamw;
}

bool is_use(const std::string& use) { return use == "calibration" || use == "validation" || use == "missed"; }

template <class Number>
bool read_number(const std::string& word, Number* number) {
  const auto parsed = std::from_chars(word.data(), word.data() + word.size(), *number);
  return parsed.ec == std::errc() && parsed.ptr == word.data() + word.size();
}

// Whether the line is one.
bool read_line(const std::string& line, Measured* m) {
  constexpr size_t kWords = 12;
  std::vector<std::string> words(kWords);
  std::istringstream rest(line);
  for (size_t i = 0; i + 1 < kWords; ++i) {
    if (!std::getline(rest, words[i], ',')) return false;
  }
  std::getline(rest, words.back());  // commas and all
  m->machine = words[0], m->model = words[1], m->rule = words[2], m->scheme = words[3];
  m->use = words[10], m->source = words[11];
  return read_number(words[4], &m->ranks) && read_number(words[5], &m->ranks_per_node) &&
         read_number(words[6], &m->gbit) && read_number(words[7], &m->compute) &&
         read_number(words[8], &m->ranks_per_core) && read_number(words[9], &m->milliseconds) &&
         m->milliseconds > 0 && m->ranks_per_core > 0 && m->gbit >= 0 && is_use(m->use) && !m->source.empty();
}

}  // namespace

std::vector<Measured> read_measured(const std::string& path) {
  std::ifstream file = opened(path);
  std::vector<Measured> all;
  bool has_columns = false;
  size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.empty() || line.front() == '#') continue;
    if (!has_columns) {
      pacer::require(line == kColumns, path, " does not begin with the columns ", kColumns);
      has_columns = true;
      continue;
    }
    Measured measured;
    pacer::require(read_line(line, &measured), path, ": line ", number,
                   " is no measurement; its columns are ", kColumns);
    all.push_back(measured);
  }
  pacer::require(!all.empty(), path, " holds no measurements");
  return all;
}

double predicted(const Measured& measured) {
  Workload work;
  work.parameters = parameters_of(measured.model);
  work.rule = rule_named(measured.rule);
  work.forward = measured.compute * 1e-3 * kForwardShare;
  work.backward = measured.compute * 1e-3 * (1 - kForwardShare);
  work.ranks_per_core = measured.ranks_per_core;
  work.block_scales = false;  // all of these were measured with one scale
  constexpr double kLatency = 25;
  const Cluster cluster{measured.ranks, measured.ranks_per_node,
                        network_link(measured.gbit, kTcpShare, kLatency)};
  cluster.check();
  pacer::require(cluster.nodes() == 1 || measured.gbit > 0, "several nodes need a link");
  const auto time = step_time(work, machine_named(measured.machine), cluster, scheme_named(measured.scheme));
  pacer::require(time.has_value(), "there is no ", measured.scheme, " for ", measured.ranks,
                 " ranks on nodes of ", measured.ranks_per_node, " with ", measured.rule);
  return time->step * 1e3;
}

std::string comparison(const std::vector<Measured>& all) {
  std::string text;
  char line[256];
  std::snprintf(line, sizeof line, "%-7s %-10s %-11s %-11s %5s %5s %5s %10s %10s %8s  %s\n", "machine",
                "model", "rule", "scheme", "ranks", "hosts", "Gbit", "measured", "model ms", "off", "use");
  text += line;
  std::map<std::string, std::pair<int, int>> counts;  // within a tenth, all
  for (const Measured& m : all) {
    const double model = predicted(m), off = model / m.milliseconds - 1;
    std::snprintf(line, sizeof line, "%-7s %-10s %-11s %-11s %5lld %5lld %5g %10.2f %10.2f %+7.1f%%  %s\n",
                  m.machine.c_str(), m.model.c_str(), m.rule.c_str(), m.scheme.c_str(),
                  static_cast<long long>(m.ranks),
                  static_cast<long long>(m.ranks / std::min(m.ranks, m.ranks_per_node)), m.gbit,
                  m.milliseconds, model, 100 * off, m.use.c_str());
    text += line;
    auto& [within, count] = counts[m.use];
    within += std::fabs(off) <= kGoal ? 1 : 0;
    ++count;
  }
  for (const auto& [use, count] : counts) {
    text +=
        use + ": " + std::to_string(count.first) + " of " + std::to_string(count.second) + " within 10 %\n";
  }
  return text;
}

Machine with_kernels(Machine machine, const std::string& path) {
  std::ifstream file = opened(path);
  double most = 0;
  for (std::string line; std::getline(file, line);) {
    std::string text = line, which, contender;
    double parameters = 0, copy = 0, fraction = 0;
    pacer::JsonScanner scanner(text.data(), text.size(), 0, path);
    scanner.expect('{');
    if (!scanner.take('}')) {
      do {
        const std::string key(scanner.string());
        scanner.expect(':');
        if (key == "case") {
          which = scanner.string();
        } else if (key == "contender") {
          contender = scanner.string();
        } else if (key == "parameters") {
          parameters = scanner.number();
        } else if (key == "copy_gigabytes_per_second") {
          copy = scanner.number() * 1e9;
        } else if (key == "fraction_of_copy") {
          fraction = scanner.number();
        } else {
          scanner.skip_value();
        }
      } while (scanner.more('}'));
    }
    const bool is_fp32 = which.size() > 5 && which.compare(which.size() - 5, 5, "/fp32") == 0;
    if (!is_fp32 || contender != "pacer" || copy <= 0 || fraction <= 0 || parameters <= most) continue;
    most = parameters;
    machine.copy = copy;
    machine.update_share = fraction;
  }
  pacer::require<pacer::FileError>(
      most > 0, path, " has no fp32 step of pacer; write one with pacer-bench kernels --json FILE");
  return machine;
}

}  // namespace scaling
