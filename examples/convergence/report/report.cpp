// The page: which charts there are, and the HTML around them.
#include "report.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "chart.h"
#include "convergence/format.h"
#include "report_style.h"
#include "support/svg.h"
#include "table.h"

namespace convergence {
namespace {

using examples::svg::escape;

constexpr double kSmoothing = 0.9;            // of the training curve, per point
constexpr double kStandardErrorsShown = 2.0;  // half the height of the band around a difference

using CurveOf = std::function<Curve(const Run&)>;

ChartLine as_line(const std::string& name, size_t colour, const Curve& curve, Axis x) {
  ChartLine line;
  line.name = name;
  line.colour = colour;
  for (const CurvePoint& point : curve) {
    line.points.push_back({x == Axis::time ? point.seconds : static_cast<double>(point.tokens), point.value});
  }
  return line;
}

// Fills the chart with one line per arm, and a faint one per run where there are several.
Chart with_lines(Chart chart, const std::vector<Run>& runs, const std::vector<ArmSummary>& summaries,
                 const CurveOf& curve_of_run, double smoothing, bool markers) {
  for (size_t i = 0; i < summaries.size(); ++i) {
    std::vector<Curve> curves;
    for (const Run* run : runs_of(runs, summaries[i].arm)) curves.push_back(curve_of_run(*run));
    const auto shown = [&](const Curve& curve) {
      return as_line(summaries[i].arm, i, smooth(curve, smoothing), chart.x);
    };
    chart.lines.push_back(shown(mean_curve(curves)));
    chart.lines.back().markers = markers;
    if (curves.size() < 2) continue;
    for (const Curve& curve : curves) {
      chart.lines.push_back(shown(curve));
      chart.lines.back().faint = true;
    }
  }
  return chart;
}

std::string loss_charts(const std::vector<Run>& runs, const std::vector<ArmSummary>& summaries) {
  std::string html;
  for (const bool training : {false, true}) {
    for (const Axis x : {Axis::tokens, Axis::time}) {
      Chart chart;
      chart.title = std::string(training ? "Training loss" : "Validation loss") +
                    (x == Axis::time ? " over time" : " over tokens");
      chart.x = x;
      const auto loss = [training](const Run& run) {
        return training ? curve_of(run, &TrainingPoint::loss) : run.validation;
      };
      html += line_chart(with_lines(chart, runs, summaries, loss, training ? kSmoothing : 0.0, !training));
    }
  }
  return html;
}

// Whether any of its lines has another value than the first point.
bool moves(const Chart& chart) {
  std::optional<double> first;
  for (const ChartLine& line : chart.lines) {
    for (const ChartPoint& point : line.points) {
      if (point.y != first.value_or(point.y)) return true;
      first = point.y;
    }
  }
  return false;
}

// What the methods did, one small chart per quantity that was measured and changed.
std::string method_charts(const std::vector<Run>& runs, const std::vector<ArmSummary>& summaries) {
  struct Quantity {
    const char* title;
    double TrainingPoint::*member;
    double smoothing;
  };
  std::string html;
  for (const Quantity& quantity :
       {Quantity{"Sequence length, bytes", &TrainingPoint::sequence_length, 0.0},
        Quantity{"Kept layers, mean", &TrainingPoint::kept_layers, kSmoothing},
        Quantity{"Theta of layer dropping", &TrainingPoint::theta, 0.0},
        Quantity{"Micro-batches of a step", &TrainingPoint::micro_steps, 0.0},
        Quantity{"Learning rate", &TrainingPoint::learning_rate, 0.0},
        Quantity{"Gradient norm before clipping", &TrainingPoint::gradient_norm, kSmoothing}}) {
    Chart chart;
    chart.title = quantity.title;
    chart.y = Axis::plain;
    const auto curve = [&](const Run& run) { return curve_of(run, quantity.member); };
    chart = with_lines(chart, runs, summaries, curve, quantity.smoothing, /*markers=*/false);
    if (moves(chart)) html += line_chart(chart);
  }
  return html;
}

// How far each arm is from the first one, over pairs of runs with the same seed.
Chart difference_chart(const std::vector<Run>& runs, const std::vector<ArmSummary>& summaries) {
  Chart chart;
  chart.title = "Validation loss minus that of " + summaries.front().arm;
  chart.y = Axis::difference;
  const auto first = runs_of(runs, summaries.front().arm);
  for (size_t i = 1; i < summaries.size(); ++i) {
    ChartLine line;
    line.name = summaries[i].arm;
    line.colour = i;
    line.markers = true;
    const auto own = runs_of(runs, summaries[i].arm);
    std::vector<Curve> curves;
    for (const Run* run : own) curves.push_back(run->validation);
    const Curve curve = mean_curve(curves);
    for (size_t k = 0; k < curve.size(); ++k) {
      std::vector<double> differences;
      for (const Run* run : own) {
        for (const Run* other : first) {
          if (other->seed != run->seed || other->validation.size() <= k) continue;
          differences.push_back(run->validation[k].value - other->validation[k].value);
        }
      }
      const Estimate difference = estimate(differences);
      line.points.push_back({static_cast<double>(curve[k].tokens), difference.mean,
                             kStandardErrorsShown * difference.standard_error});
    }
    if (own.size() > 1) chart.band_meaning = "± 2 standard errors";
    chart.lines.push_back(std::move(line));
  }
  return chart;
}

// One bar per arm for a time out of its summary.
std::string time_bars(const std::string& title, const std::vector<ArmSummary>& summaries,
                      double ArmSummary::*seconds) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < summaries.size(); ++i) {
    const double value = summaries[i].*seconds, first = summaries.front().*seconds;
    std::string label = significant(value * 1e3, 3) + " ms";
    if (i > 0 && first > 0.0) label += ", " + significant(value / first, 2) + " × the time";
    bars.push_back({summaries[i].arm, i, value, label});
  }
  return bar_chart(title, bars);
}

enum class FirstColumn { arms, names };

std::string html_table(const Table& table, FirstColumn first = FirstColumn::arms) {
  std::string html = "<table>\n<thead><tr>";
  for (std::string title : table.header) {
    std::replace(title.begin(), title.end(), '\n', ' ');
    html += "<th scope=\"col\">" + escape(title) + "</th>";
  }
  html += "</tr></thead>\n<tbody>\n";
  for (size_t i = 0; i < table.rows.size(); ++i) {
    html += "<tr>";
    for (size_t k = 0; k < table.rows[i].size(); ++k) {
      const std::string swatch =
          "<span class=\"swatch\" style=\"background: var(--series-" + std::to_string(i % 6) + ")\"></span>";
      const bool is_arm = k == 0 && first == FirstColumn::arms;
      html += "<td>" + (is_arm ? swatch : "") + escape(table.rows[i][k]) + "</td>";
    }
    html += "</tr>\n";
  }
  return html + "</tbody>\n</table>\n";
}

// Of every run of 1-bit LAMB, folded away.
std::string tensor_tables(const std::vector<Run>& runs) {
  std::string html;
  for (const Run& run : runs) {
    const Table table = tensor_table(run);
    if (table.rows.empty()) continue;
    html += "<details class=\"panel\"><summary>" + escape(run.arm) + ", seed " + std::to_string(run.seed) +
            ": coefficient and factor of each tensor, and what its momentum is multiplied with</summary>\n" +
            html_table(table, FirstColumn::names) + "</details>\n";
  }
  return html;
}

// What to look at, arm by arm, with what to type and where to read on.
std::string hint_list(const StudyReport& report) {
  if (report.hints.empty()) return {};
  std::string html = "<h2>What to look at, and what to type next</h2>\n<div class=\"panel\">\n<dl>\n";
  for (const Hint& hint : report.hints) {
    html += "<dt>" + escape(hint.arm) + "</dt><dd>" + escape(hint.text);
    if (!hint.code.empty()) {
      const std::string page = "docs/" + escape(hint.page);
      html += "<br><code>" + escape(hint.code) + "</code> ";
      html += report.docs.empty()
                  ? page
                  : "<a href=\"" + escape(report.docs + "/" + hint.page) + "\">" + page + "</a>";
    }
    html += "</dd>\n";
  }
  return html + "</dl>\n</div>\n";
}

// The files beside the report.
std::string file_links(const std::vector<Run>& runs) {
  std::string html = "<dt>Files</dt><dd><a href=\"settings.ini\">settings.ini</a>";
  for (const Run& run : runs) {
    const std::string file = escape(run.arm + "-seed-" + std::to_string(run.seed) + "/metrics.jsonl");
    html += ", <a href=\"" + file + "\">" + file + "</a>";
  }
  return html + "</dd>\n";
}

}  // namespace

std::string report_as_html(const StudyReport& report) {
  const auto summaries = summarize(report.runs);
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>pacer: "
      "convergence study, " +
      escape(report.date) + "</title>\n<style>" + std::string(kReportStyle) +
      "</style>\n</head>\n<body>\n<h1>pacer: convergence study</h1>\n<p class=\"lede\">" +
      escape(report.headline) + ", " + escape(report.date) + "</p>\n";
  for (const Table& table : tables_of(summaries, report.bases)) {
    html += "<div class=\"panel\">\n" + html_table(table) + "</div>\n";
  }
  html += "<p class=\"note\">" + escape(table_note(summaries) + fine_tuning_note(report.bases)) +
          " Training curves, kept layers and gradient norms are smoothed.</p>\n";
  html += hint_list(report);
  html += "<div class=\"charts\">\n";
  html += loss_charts(report.runs, summaries);
  if (summaries.size() > 1) html += line_chart(difference_chart(report.runs, summaries));
  html += "<div class=\"stack\">\n" +
          time_bars("Time of one optimizer step", summaries, &ArmSummary::optimizer_seconds) +
          time_bars("Time of one whole training step", summaries, &ArmSummary::step_seconds) + "</div>\n";
  html += "</div>\n<h2>What the methods did, over tokens</h2>\n<div class=\"charts small\">\n" +
          method_charts(report.runs, summaries);
  html += "</div>\n" + tensor_tables(report.runs);
  html += "<h2>Set-up</h2>\n<div class=\"panel\">\n<dl>\n";
  for (const auto& [name, value] : report.facts) {
    html += "<dt>" + escape(name) + "</dt><dd>" + escape(value) + "</dd>\n";
  }
  html += file_links(report.runs);
  html += "</dl>\n<details><summary>All settings</summary>\n<pre>" + escape(report.settings) +
          "</pre></details>\n</div>\n<script>" + std::string(kReportScript) + "</script>\n</body>\n</html>\n";
  return html;
}

}  // namespace convergence
