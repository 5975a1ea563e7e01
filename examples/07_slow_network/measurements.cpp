#include "measurements.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include <pacer/core/error.h>

#include "collectives/chart.h"
#include "support/whole_file.h"

namespace slow_network {
namespace {

constexpr const char* kColumns =
    "model,optimizer,backend,ranks,gbit_per_s,slowest_rank_ms,bytes_per_step,steps";

std::string text_of(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string padded(const std::string& text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}

std::string link_of(const Measurement& measurement) {
  return measurement.gbit > 0 ? text_of("%g Gbit/s", measurement.gbit) : "unshaped";
}

bool is_peer(const Measurement& a, const Measurement& b) {
  return a.model == b.model && a.backend == b.backend && a.ranks == b.ranks;
}

const Measurement* find(const std::vector<Measurement>& all, const Measurement& like, double gbit,
                        const std::string& optimizer) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Measurement& other) {
    return is_peer(other, like) && other.gbit == gbit && other.optimizer == optimizer;
  });
  return found == all.end() ? nullptr : &*found;
}

std::string row_of(const Measurement& measurement, const std::vector<Measurement>& all) {
  const double expected = expected_milliseconds(measurement, all);
  const Measurement* first = find(all, measurement, measurement.gbit, all.front().optimizer);
  std::string row = "  " + link_of(measurement);
  row.resize(16, ' ');
  row += measurement.optimizer;
  row.resize(37, ' ');
  row += padded(text_of("%.1f", measurement.milliseconds), 10);
  row += padded(expected > 0 ? text_of("%.1f", expected) : "", 12);
  row += padded(expected > 0 ? text_of("%.2f", measurement.milliseconds / expected) : "", 12);
  row += padded(text_of("%.2f", static_cast<double>(measurement.bytes_sent) / 1e6), 11);
  row += padded(first != nullptr ? text_of("%.2f", first->milliseconds / measurement.milliseconds) : "", 12);
  return row + "\n";
}

}  // namespace

void append(const std::string& path, const std::vector<Measurement>& measurements) {
  std::ifstream before(path, std::ios::binary);
  pacer::require<pacer::FileError>(before.good() || !std::filesystem::exists(path), "cannot read ", path,
                                   ", to which rows are to be added");
  std::string text{std::istreambuf_iterator<char>(before), std::istreambuf_iterator<char>()};
  if (text.empty()) text = std::string(kColumns) + '\n';
  std::ostringstream rows;
  for (const Measurement& entry : measurements) {
    rows << entry.model << ',' << entry.optimizer << ',' << entry.backend << ',' << entry.ranks << ','
         << text_of("%g", entry.gbit) << ',' << text_of("%.4f", entry.milliseconds) << ',' << entry.bytes_sent
         << ',' << entry.steps << '\n';
  }
  examples::write_whole_file(path, text + rows.str());
}

std::vector<Measurement> read_measurements(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  pacer::require<pacer::FileError>(std::getline(file, line).good(), "cannot read ", path,
                                   "; choose a file that --csv has written");
  pacer::require(line == kColumns, path, " does not begin with the columns ", kColumns,
                 "; choose a file that --csv has written");
  std::vector<Measurement> measurements;
  while (std::getline(file, line)) {
    Measurement entry;
    std::istringstream words(line), numbers;
    std::string rest;
    std::getline(words, entry.model, ',');
    std::getline(words, entry.optimizer, ',');
    std::getline(words, entry.backend, ',');
    std::getline(words, rest);
    std::replace(rest.begin(), rest.end(), ',', ' ');
    numbers.str(rest);
    numbers >> entry.ranks >> entry.gbit >> entry.milliseconds >> entry.bytes_sent >> entry.steps;
    pacer::require(!numbers.fail() && entry.milliseconds > 0, path, ": line ", measurements.size() + 2,
                   " is no measurement; choose a file that --csv has written");
    measurements.push_back(std::move(entry));
  }
  pacer::require(!measurements.empty(), path, " holds no measurements; write some with --csv");
  return measurements;
}

double expected_milliseconds(const Measurement& measurement, const std::vector<Measurement>& all) {
  if (measurement.gbit <= 0) return 0;
  const Measurement* unshaped = find(all, measurement, 0, measurement.optimizer);
  if (unshaped == nullptr) return 0;
  return unshaped->milliseconds + static_cast<double>(measurement.bytes_sent) * 8e-6 / measurement.gbit;
}

std::string as_tables(const std::vector<Measurement>& measurements) {
  std::string tables;
  const Measurement* last = nullptr;
  for (const Measurement& entry : measurements) {
    if (last == nullptr || !is_peer(*last, entry)) {
      tables += "\n" + entry.model + ", " + std::to_string(entry.ranks) + " ranks over " + entry.backend +
                "\n  link          optimizer               ms/step    model ms     / model    MB sent    "
                "speed-up\n";
    } else if (last->gbit != entry.gbit) {
      tables += "\n";
    }
    tables += row_of(entry, measurements);
    last = &entry;
  }
  return tables +
         "\nms/step: the slowest rank's, the median over steps. model: the unshaped time + bytes sent x 8 / "
         "bandwidth.\nspeed-up: over the first optimizer on the same link.\n";
}

std::string as_chart(const std::vector<Measurement>& measurements, int64_t ranks) {
  std::map<std::string, size_t> numbers;
  std::vector<collectives::Line> lines, models;
  std::set<double> bandwidths;
  std::string title;
  for (const Measurement& entry : measurements) {
    if (entry.gbit <= 0 || entry.ranks != ranks) continue;
    bandwidths.insert(entry.gbit);
    title = entry.model + ", " + std::to_string(ranks) + " ranks over " + entry.backend;
    const size_t i = numbers.emplace(entry.optimizer, lines.size()).first->second;
    if (i == lines.size()) {
      lines.push_back({entry.optimizer, false, {}});
      models.push_back({"model " + entry.optimizer, true, {}});
    }
    lines[i].points.emplace_back(entry.gbit, entry.milliseconds);
    const double expected = expected_milliseconds(entry, measurements);
    if (expected > 0) models[i].points.emplace_back(entry.gbit, expected);
  }
  if (bandwidths.size() < 2) return "";
  lines.insert(lines.end(), models.begin(), models.end());
  for (collectives::Line& line : lines) std::sort(line.points.begin(), line.points.end());
  return collectives::line_chart("Optimizer step over slow links: " + title, "Gbit/s of a link, each way",
                                 "milliseconds, slowest rank", lines);
}

}  // namespace slow_network
