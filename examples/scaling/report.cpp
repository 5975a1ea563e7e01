#include "report.h"

#include <cstdio>

#include <pacer/files/json_lines.h>

#include "collectives/chart.h"

namespace scaling {
namespace {

template <class... Values>
std::string text(const char* format, Values... values) {
  char line[160];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

std::string number(double value) {
  return value >= 1000 ? text("%12.0f", value) : value >= 10 ? text("%12.1f", value) : text("%12.3f", value);
}

std::string heading() {
  std::string line = " ranks hosts";
  for (const SchemeName& scheme : schemes()) line += text("%12s", scheme.name);
  return line;
}

template <class Value>
std::string cells(const Row& row, const Value& value) {
  std::string line = text("%6lld%6lld", static_cast<long long>(row.cluster.ranks),
                          static_cast<long long>(row.cluster.nodes()));
  for (const Choice& choice : row.choices)
    line += choice.time ? number(value(*choice.time)) : text("%12s", "-");
  return line;
}

}  // namespace

std::string table(const Setting& setting, const std::vector<Row>& rows) {
  std::string all = setting.title +
                    "\n\nms a step; 1-bit: after the warm-up; best: the first within a tenth of the least, "
                    "over a run with " +
                    text("%.3g", 100 * setting.warm_up.share_of_run()) + " % of its steps in full precision" +
                    (setting.warm_up.is_bf16 ? ", as bf16\n" : "\n") + heading() +
                    "  best, ms of its mean step\n";
  for (const Row& row : rows) {
    all += cells(row, [](const StepTime& time) { return time.step * 1e3; }) + "  " +
           schemes()[row.best].name + text(" %.4g", row.choices[row.best].run * 1e3) + "\n";
  }
  all += "\nMB that a rank sends in a step\n" + heading() + "\n";
  for (const Row& row : rows) all += cells(row, [](const StepTime& time) { return time.sent * 1e-6; }) + "\n";
  all += "\nMB through the link of a host in a step\n" + heading() + "\n";
  for (const Row& row : rows) all += cells(row, [](const StepTime& time) { return time.host * 1e-6; }) + "\n";
  return all;
}

std::string json_lines(const std::vector<Row>& rows) {
  std::string all;
  for (const Row& row : rows) {
    for (size_t i = 0; i < kSchemeCount; ++i) {
      const Choice& choice = row.choices[i];
      if (!choice.time) continue;
      all += pacer::JsonLine()
                 .add("ranks", row.cluster.ranks)
                 .add("hosts", row.cluster.nodes())
                 .add("scheme", schemes()[i].name)
                 .add("step_ms", choice.time->step * 1e3)
                 .add("run_ms", choice.run * 1e3)
                 .add("exchange_ms", choice.time->exchange * 1e3)
                 .add("kernels_ms", choice.time->kernels * 1e3)
                 .add("rank_bytes", choice.time->sent)
                 .add("host_bytes", choice.time->host)
                 .add("best", i == row.best)
                 .str() +
             "\n";
    }
  }
  return all;
}

std::string drawing(const Setting& setting, const std::vector<Row>& rows) {
  std::vector<collectives::Line> lines;
  for (size_t i = 0; i < kSchemeCount; ++i) {
    collectives::Line line{schemes()[i].name, false, {}};
    for (const Row& row : rows) {
      const Choice& choice = row.choices[i];
      if (choice.time)
        line.points.emplace_back(static_cast<double>(row.cluster.ranks), choice.time->step * 1e3);
    }
    lines.push_back(line);
  }
  const double compute = (setting.work.forward + setting.work.backward) * 1e3;
  if (compute > 0 && !rows.empty()) {
    collectives::Line line{"compute", true, {}};
    for (const Row& row : rows) line.points.emplace_back(static_cast<double>(row.cluster.ranks), compute);
    lines.push_back(line);
  }
  return collectives::line_chart(setting.title, "ranks", "milliseconds a step", lines);
}

}  // namespace scaling
