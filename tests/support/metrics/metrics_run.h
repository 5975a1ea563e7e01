// Runs with the Metrics hook, and what they left in its files, for the tests of the hook.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/sgd.h>
#include <nlohmann/json.hpp>

#include <pacer/hooks/step_report.h>
#include <pacer/metrics/metrics.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing {

using MetricsJson = nlohmann::ordered_json;

inline std::vector<MetricsJson> metrics_lines(const TemporaryFolder& folder) {
  std::vector<MetricsJson> lines;
  std::istringstream text(content_of(folder.path("metrics.jsonl")));
  for (std::string line; std::getline(text, line);) lines.push_back(MetricsJson::parse(line));
  return lines;
}

inline std::vector<int64_t> metrics_steps(const TemporaryFolder& folder) {
  std::vector<int64_t> steps;
  for (const MetricsJson& line : metrics_lines(folder)) steps.push_back(line["step"].get<int64_t>());
  return steps;
}

// Rows of cells; no cell of these tests has a comma or quote in it unless a test says so.
inline std::vector<std::vector<std::string>> metrics_rows(const TemporaryFolder& folder) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream text(content_of(folder.path("metrics.csv")));
  for (std::string line; std::getline(text, line);) {
    auto& row = rows.emplace_back();
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = line.find(',', begin);
      row.push_back(line.substr(begin, end - begin));
    }
  }
  return rows;
}

// The one difference: JSON has no words for what is not finite.
inline double metrics_number(const MetricsJson& value) {
  return value.is_string() ? std::strtod(value.get<std::string>().c_str(), nullptr) : value.get<double>();
}

// Every number of metrics.jsonl is in metrics.csv and nothing else.
inline void check_csv_equals_jsonl(const TemporaryFolder& folder) {
  const auto lines = metrics_lines(folder);
  const auto rows = metrics_rows(folder);
  REQUIRE(rows.size() == lines.size() + 1);
  for (size_t i = 0; i < lines.size(); ++i) {
    REQUIRE(rows[i + 1].size() == rows[0].size());
    size_t filled = 0;
    for (size_t c = 0; c < rows[0].size(); ++c) {
      CAPTURE(i, rows[0][c]);
      if (rows[i + 1][c].empty()) continue;
      ++filled;
      REQUIRE(lines[i].contains(rows[0][c]));
      const double expected = metrics_number(lines[i][rows[0][c]]);
      const double found = std::strtod(rows[i + 1][c].c_str(), nullptr);
      CHECK(((std::isnan(expected) && std::isnan(found)) || expected == found));
    }
    CHECK(filled == lines[i].size());
  }
}

inline MetricsOptions quiet_metrics(const TemporaryFolder& folder) {
  return MetricsOptions(folder.path()).progress(false);
}

// Stands for resume(): the run has these steps behind it. Reports numbers, if any are given.
class MetricsSeam : public Hook {
 public:
  explicit MetricsSeam(Progress progress) : progress_(progress) {}
  explicit MetricsSeam(std::function<void(StepReport&)> report) : report_(std::move(report)) {}
  std::string hook_name() const override { return "seam"; }
  Slot slot() const override { return Slot::schedule; }
  void attach(SessionParts& parts) override { parts.progress = progress_; }
  void after_step(StepReport& report) override {
    if (report_) report_(report);
  }

 private:
  Progress progress_;
  std::function<void(StepReport&)> report_;
};

inline Progress metrics_progress(int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

// A model, its optimizer and a Session, trained step by step.
struct MetricsRun {
  SmallModel model = small_model();
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  Session session{*model, optimizer};

  // Loss x factor is what is trained on.
  void step(int64_t i, double factor = 1) {
    const auto batch = small_batch(i);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->loss(x, y) * factor);
    session.step();
  }
  void steps(int64_t count) {
    for (int64_t i = 0; i < count; ++i) step(session.progress().step);
  }
};

// Trains `count` steps into a folder, with `before` steps of a former run behind it.
inline void metrics_run(const MetricsOptions& options, int64_t before, int64_t count) {
  MetricsRun run;
  run.session.use(MetricsSeam(metrics_progress(before, 32 * before))).use(Metrics(options));
  run.steps(count);
  run.session.finish();
}

inline std::vector<int64_t> metrics_range(int64_t first, int64_t last) {
  std::vector<int64_t> steps;
  for (int64_t step = first; step <= last; ++step) steps.push_back(step);
  return steps;
}

}  // namespace pacer::testing
