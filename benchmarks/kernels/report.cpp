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

void Report::say(const std::string& which, const std::string& text) {
  std::printf("%-28s %s\n", which.c_str(), text.c_str());
  std::fflush(stdout);
}

void Report::bandwidth(const std::string& which, const std::string& what, double bytes_per_second) {
  say(which, format("%-18s  %.1f GB/s read + written", what.c_str(), bytes_per_second / 1e9));
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
  say(title_of(result), format("%-18s", measurement.contender.c_str()) + numbers);
}

void Report::failed(const std::string& which, const std::string& why) {
  failures_.push_back(which + ": " + why);
  say(which, "FAILED: " + why);
  if (json_) json_->write(pacer::JsonLine().add("kind", "failure").add("case", which).add("reason", why));
}

bool Report::has_room(const std::string& which, const char* memory, int64_t needed, int64_t free) {
  if (needed <= free) return true;
  const auto gigabytes = [](int64_t bytes) { return static_cast<double>(bytes) / 1e9; };
  const std::string why =
      format("needs %.1f GB of %s and %.1f GB are free", gigabytes(needed), memory, gigabytes(free));
  say(which, "skipped: " + why);
  if (json_) json_->write(pacer::JsonLine().add("kind", "skipped").add("case", which).add("reason", why));
  return false;
}

void Report::add(CaseResult result) {
  for (const auto& measurement : result.measurements) {
    for (const auto& timing : measurement.timings) {
      if (json_) json_->write(json_of(result, measurement, timing));
    }
  }
  results_.push_back(std::move(result));
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
    std::printf("\n%s, %s: %g bytes per parameter; times in ms, bandwidths in GB/s\n%s",
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
