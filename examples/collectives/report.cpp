// Plain arithmetic on measurements that are already there. Times are shown in milliseconds, bytes in MB of
// 10^6, shares in percent.
#include "report.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "chart.h"
#include "schemes.h"

namespace collectives {
namespace {

constexpr double kElementBytes = 4;  // fp32

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string
text(const char* format, ...) {
  char line[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof line, format, values);
  va_end(values);
  return line;
}

double milliseconds(double seconds) { return seconds * 1e3; }

double percent(double share) { return share * 100; }

// The shortest exchange that the links allow, in seconds; 0 where they are not known.
double bound(const Setting& setting, double elements) {
  if (setting.rate <= 0) return 0;
  return least_bytes(elements * kElementBytes, setting.world_size) * 8 / setting.rate;
}

double compute_of(const StepResults& step) { return step.measurements.front().timing.slowest; }

double exposed(const StepResults& step, const Measured& measured) {
  return std::max(0.0, measured.timing.slowest - compute_of(step));
}

Line line_of(const std::string& name, const Bubble& bubble, double BubblePoint::*value) {
  Line line{name, false, {}};
  for (const BubblePoint& point : bubble.points) {
    line.points.emplace_back(static_cast<double>(point.micro_batches), point.*value);
  }
  return line;
}

}  // namespace

std::string describe(const Setting& setting) {
  std::string line = text("%d ranks, %s", setting.world_size, setting.backend.c_str());
  if (setting.rate > 0) line += text(", links of %g Gbit/s", setting.rate / 1e9);
  return line;
}

std::string exchange_table(const Setting& setting, const ExchangeResults& results) {
  const auto elements = static_cast<double>(results.size.elements);
  const double least = bound(setting, elements);
  const double buckets = results.measurements.back().timing.slowest;
  std::string table = text("\nexchange of %.3g elements (%.3g MB) in %lld tensors, %lld times\n", elements,
                           elements * kElementBytes / 1e6, static_cast<long long>(results.size.tensors),
                           static_cast<long long>(results.measurements.front().timing.repetitions));
  table += text("  %-22s %12s %12s %14s %12s%s\n", "scheme", "mean ms", "slowest ms", "busiest sends",
                "/ buckets", least > 0 ? "     / bound" : "");
  for (const Measured& entry : results.measurements) {
    const Timing& timing = entry.timing;
    table += text("  %-22s %12.3f %12.3f %11.3f MB %12.2f", entry.scheme.c_str(), milliseconds(timing.mean),
                  milliseconds(timing.slowest), static_cast<double>(timing.busiest_bytes) / 1e6,
                  timing.slowest / buckets);
    table += least > 0 ? text(" %11.2f\n", timing.slowest / least) : "\n";
  }
  if (least > 0) table += text("  %-22s %12s %12.3f\n", "bound of the links", "", milliseconds(least));
  return table;
}

std::string step_table(const StepResults& results) {
  std::string table = text(
      "\ntraining step: %.3g M parameters in %lld tensors, %lld rows a rank, %lld buckets of which %lld left "
      "during "
      "backward, %lld times\n",
      static_cast<double>(results.elements) / 1e6, static_cast<long long>(results.tensors),
      static_cast<long long>(results.rows), static_cast<long long>(results.buckets),
      static_cast<long long>(results.buckets_early),
      static_cast<long long>(results.measurements.front().timing.repetitions));
  table += text("  %-24s %12s %12s %14s %12s\n", "scheme", "mean ms", "slowest ms", "exchange adds",
                "/ overlapped");
  const double overlapped = results.measurements.back().timing.slowest;
  for (const Measured& entry : results.measurements) {
    table +=
        text("  %-24s %12.2f %12.2f %14.2f %12.2f\n", entry.scheme.c_str(), milliseconds(entry.timing.mean),
             milliseconds(entry.timing.slowest), milliseconds(entry.timing.slowest - compute_of(results)),
             entry.timing.slowest / overlapped);
  }
  return table;
}

std::string as_csv(const Setting& setting, const std::vector<ExchangeResults>& exchanges,
                   const StepResults& step) {
  std::string csv =
      "what,scheme,ranks,backend,gbit_per_s,elements,tensors,mean_seconds,slowest_seconds,repetitions,"
      "busiest_rank_bytes\n";
  const auto add = [&](const char* what, const Measured& entry, int64_t elements, int64_t tensors) {
    csv += text("%s,\"%s\",%d,\"%s\",%g,%lld,%lld,%.9g,%.9g,%lld,%lld\n", what, entry.scheme.c_str(),
                setting.world_size, setting.backend.c_str(), setting.rate / 1e9,
                static_cast<long long>(elements), static_cast<long long>(tensors), entry.timing.mean,
                entry.timing.slowest, static_cast<long long>(entry.timing.repetitions),
                static_cast<long long>(entry.timing.busiest_bytes));
  };
  for (const ExchangeResults& results : exchanges) {
    for (const Measured& entry : results.measurements) {
      add("exchange", entry, results.size.elements, results.size.tensors);
    }
  }
  for (const Measured& entry : step.measurements) add("step", entry, step.elements, step.tensors);
  return csv;
}

std::string exchange_chart(const Setting& setting, const std::vector<ExchangeResults>& exchanges) {
  std::vector<Line> lines;
  if (exchanges.empty()) return {};
  for (size_t i = 0; i < exchanges.front().measurements.size(); ++i) {
    lines.push_back({exchanges.front().measurements[i].scheme, false, {}});
    for (const ExchangeResults& results : exchanges) {
      lines.back().points.emplace_back(static_cast<double>(results.size.elements),
                                       milliseconds(results.measurements[i].timing.slowest));
    }
  }
  if (setting.rate > 0) {
    lines.push_back({"bound of the links", true, {}});
    for (const ExchangeResults& results : exchanges) {
      const auto elements = static_cast<double>(results.size.elements);
      lines.back().points.emplace_back(elements, milliseconds(bound(setting, elements)));
    }
  }
  return line_chart("Exchange of gradients: " + describe(setting),
                    "elements (fp32) of all gradients together", "milliseconds, slowest rank", lines);
}

std::string step_chart(const Setting& setting, const StepResults& step) {
  std::vector<Bar> bars;
  for (const Measured& entry : step.measurements) {
    const double total = milliseconds(entry.timing.slowest);
    bars.push_back({entry.scheme, total - milliseconds(exposed(step, entry)),
                    milliseconds(exposed(step, entry)),
                    total < 1000 ? text("%.3g ms", total) : text("%.2f s", total / 1e3)});
  }
  return bar_chart("A training step: " + describe(setting), "forward and backward alone",
                   "what the exchange adds", bars);
}

std::string bubble_table(const BubbleSettings& settings, const std::vector<Bubble>& bubbles) {
  std::string table = text(
      "\npipeline of %lld stages, simulated: share of a step that a rank stands idle, and micro-batches that "
      "rank 0 holds;\nslow messages take %g of a forward pass\n",
      static_cast<long long>(settings.stages), settings.message);
  table += text("  %-10s %14s %10s %10s %14s %10s %10s\n", "schedule", "micro-batches", "idle", "formula",
                "slow messages", "holds", "formula");
  for (const Bubble& bubble : bubbles) {
    for (const BubblePoint& point : bubble.points) {
      table += text("  %-10s %14lld %8.1f %% %8.1f %% %12.1f %% %10g %10g\n", bubble.schedule.c_str(),
                    static_cast<long long>(point.micro_batches), percent(point.idle), percent(point.formula),
                    percent(point.idle_messages), point.alive, point.alive_formula);
    }
  }
  return table;
}

std::string bubble_csv(const BubbleSettings& settings, const std::vector<Bubble>& bubbles) {
  std::string csv =
      "schedule,stages,micro_batches,idle,idle_formula,message,idle_with_messages,alive,alive_formula\n";
  for (const Bubble& bubble : bubbles) {
    for (const BubblePoint& point : bubble.points) {
      csv += text("\"%s\",%lld,%lld,%.9g,%.9g,%g,%.9g,%g,%g\n", bubble.schedule.c_str(),
                  static_cast<long long>(settings.stages), static_cast<long long>(point.micro_batches),
                  point.idle, point.formula, settings.message, point.idle_messages, point.alive,
                  point.alive_formula);
    }
  }
  return csv;
}

std::string idle_chart(const BubbleSettings& settings, const std::vector<Bubble>& bubbles) {
  std::vector<Line> lines;
  for (const Bubble& bubble : bubbles) {
    lines.push_back(line_of(bubble.schedule, bubble, &BubblePoint::idle));
    lines.push_back(line_of(bubble.schedule + ", slow messages", bubble, &BubblePoint::idle_messages));
  }
  lines.push_back(line_of("formula of both", bubbles.front(), &BubblePoint::formula));
  lines.back().dashed = true;
  for (Line& line : lines) {
    for (auto& [micro_batches, share] : line.points) share = percent(share);
  }
  return line_chart(text("The bubble of a pipeline of %lld stages; slow messages take %g of a forward pass",
                         static_cast<long long>(settings.stages), settings.message),
                    "micro-batches", "percent of a step idle", lines);
}

std::string alive_chart(const BubbleSettings& settings, const std::vector<Bubble>& bubbles) {
  std::vector<Line> lines;
  for (const Bubble& bubble : bubbles) {
    lines.push_back(line_of(bubble.schedule, bubble, &BubblePoint::alive));
  }
  return line_chart(text("Memory of a pipeline of %lld stages", static_cast<long long>(settings.stages)),
                    "micro-batches", "micro-batches whose activations rank 0 holds", lines);
}

}  // namespace collectives
