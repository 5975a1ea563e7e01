#include "report.h"

#include <cstdio>
#include <map>

#include "support/table.h"

namespace bench::kernels {
namespace {

std::string title_of(const CaseResult& result) {
  if (result.threads == 0) return result.which.name;
  return result.which.name + format(", %d thread%s", result.threads, result.threads == 1 ? "" : "s");
}

pacer::JsonLine json_of(const CaseResult& result, const Measurement& measurement, const Timing& timing) {
  const ModelShapes model = result.which.model();
  pacer::JsonLine line;
  line.add("kind", "result").add("case", result.which.name).add("contender", measurement.contender);
  if (result.threads > 0) line.add("threads", result.threads);
  line.add("tensors", model.shapes.size()).add("parameters", model.parameters());
  line.add("time", timing.kind).add("method", timing.method);
  line.add("ms", timing.milliseconds.median).add("ms_min", timing.milliseconds.min);
  line.add("ms_max", timing.milliseconds.max).add("measurements", timing.milliseconds.count);
  const double speed = result.bytes_per_second(timing);
  if (timing.ceiling.copy > 0) {
    line.add("bytes_per_parameter", facts_of(result.which.work).bytes_per_parameter);
    line.add("gigabytes_per_second", speed / 1e9);
    line.add("copy_gigabytes_per_second", timing.ceiling.copy / 1e9);
    line.add("fraction_of_copy", speed / timing.ceiling.copy);
  }
  if (timing.ceiling.update > 0) {
    line.add("in_place_gigabytes_per_second", timing.ceiling.update / 1e9);
    line.add("fraction_of_in_place", speed / timing.ceiling.update);
  }
  const Timing* own = result.own() ? result.own()->find(timing.kind) : nullptr;
  if (own) line.add("ratio_to_pacer", timing.milliseconds.median / own->milliseconds.median);
  return line;
}

}  // namespace

Report::Report(const std::string& json_path) {
  if (!json_path.empty()) json_ = std::make_unique<pacer::JsonLinesFile>(json_path);
}

void Report::environment(const std::vector<std::pair<std::string, std::string>>& facts) {
  pacer::JsonLine line;
  line.add("kind", "environment");
  for (const auto& [name, value] : facts) {
    std::printf("%-10s %s\n", name.c_str(), value.c_str());
    line.add(name, value);
  }
  std::printf("\n");
  std::fflush(stdout);
  if (json_) json_->write(line);
}

void Report::bandwidth(const std::string& which, const std::string& what, double bytes_per_second) {
  std::printf("%-28s %-18s  %.1f GB/s read + written\n", which.c_str(), what.c_str(), bytes_per_second / 1e9);
  std::fflush(stdout);
}

void Report::progress(const CaseResult& result, const Measurement& measurement) {
  std::string numbers;
  for (const auto& timing : measurement.timings) {
    const Spread& ms = timing.milliseconds;
    numbers +=
        format("  %s %s [%s, %s] (%lld, %s)", timing.kind.c_str(), milliseconds_text(ms.median).c_str(),
               milliseconds_text(ms.min).c_str(), milliseconds_text(ms.max).c_str(),
               static_cast<long long>(ms.count), timing.method.c_str());
  }
  std::printf("%-28s %-18s%s\n", title_of(result).c_str(), measurement.contender.c_str(), numbers.c_str());
  std::fflush(stdout);
}

void Report::failed(const std::string& which, const std::string& why) {
  failures_.push_back(which + ": " + why);
  std::printf("%-28s FAILED: %s\n", which.c_str(), why.c_str());
  std::fflush(stdout);
  if (json_) json_->write(pacer::JsonLine().add("kind", "failure").add("case", which).add("reason", why));
}

void Report::skipped(const std::string& which, const std::string& why) {
  std::printf("%-28s skipped: %s\n", which.c_str(), why.c_str());
  std::fflush(stdout);
  if (json_) json_->write(pacer::JsonLine().add("kind", "skipped").add("case", which).add("reason", why));
}

void Report::add(CaseResult result) {
  write_json(result);
  results_.push_back(std::move(result));
}

void Report::write_json(const CaseResult& result) {
  if (!json_) return;
  for (const auto& measurement : result.measurements) {
    for (const auto& timing : measurement.timings) json_->write(json_of(result, measurement, timing));
  }
}

void Report::print_tables() const {
  std::map<std::pair<Device, Work>, std::vector<const CaseResult*>> groups;
  std::map<std::string, std::string> meanings;
  for (const auto& result : results_) {
    groups[{result.which.device, result.which.work}].push_back(&result);
    for (const auto& measurement : result.measurements) meanings[measurement.contender] = measurement.meaning;
  }
  for (const auto& [key, results] : groups) {
    const WorkFacts& facts = facts_of(key.second);
    std::printf("\n%s, %s: %d bytes per parameter; times in ms, bandwidths in GB/s\n%s",
                key.first == Device::cpu ? "CPU" : "GPU", facts.title.c_str(), facts.bytes_per_parameter,
                table_of(results).c_str());
  }
  if (!meanings.empty())
    std::printf("\nEach x is the time of the column before it over pacer's. One step of\n");
  for (const auto& [contender, meaning] : meanings) {
    std::printf("  %-18s %s\n", contender.c_str(), meaning.c_str());
  }
  for (const auto& failure : failures_) std::printf("FAILED %s\n", failure.c_str());
  std::fflush(stdout);
}

}  // namespace bench::kernels
