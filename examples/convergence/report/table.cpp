// The columns of the summary, and their alignment.
#include "table.h"

#include <algorithm>

#include "convergence/format.h"

namespace convergence {
namespace {

constexpr double kMilliseconds = 1e3;

std::string time_to_loss(const Estimate& seconds) {
  if (seconds.count == 0) return "-";
  const std::string error = seconds.count > 1 ? " ± " + fixed_text(seconds.standard_error, 1) + " s" : "";
  return duration_text(seconds.mean) + error;
}

std::string with_error(const std::string& mean, const Estimate& estimate) {
  return estimate.count > 1 ? mean + " ± " + fixed_text(estimate.standard_error, 4) : mean;
}

bool several_processes(const std::vector<ArmSummary>& summaries) {
  return std::any_of(summaries.begin(), summaries.end(),
                     [](const ArmSummary& summary) { return summary.processes > 1; });
}

// The loss at the end of training.
std::string final_loss(const ArmSummary& summary) {
  return with_error(fixed_text(summary.validation_loss.mean, 4), summary.validation_loss);
}

Table summary_table(const std::vector<ArmSummary>& summaries) {
  Table table;
  const bool compared = summaries.size() > 1;
  table.header = {"arm", "validation\nloss"};
  if (compared) table.header.push_back("difference");
  table.header.insert(table.header.end(),
                      {"time", "time to\nloss",
                       several_processes(summaries) ? "optimizer +\nnetwork ms" : "optimizer\nms/step",
                       "ms/step", "tokens/s", "memory"});
  for (const ArmSummary& summary : summaries) {
    const Estimate& difference = summary.difference;
    std::vector<std::string> row = {summary.arm, final_loss(summary)};
    if (compared) {
      row.push_back(difference.count > 0 ? with_error(signed_fixed(difference.mean, 4), difference) : "");
    }
    row.insert(row.end(),
               {duration_text(summary.seconds), time_to_loss(summary.time_to_loss),
                significant(summary.optimizer_seconds * kMilliseconds, 3),
                significant(summary.step_seconds * kMilliseconds, 3),
                with_thousands(static_cast<int64_t>(summary.tokens / std::max(summary.seconds, 1e-9))),
                summary.memory_bytes > 0.0 ? short_count(summary.memory_bytes) + "B" : "-"});
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table traffic_table(const std::vector<ArmSummary>& summaries) {
  Table table;
  table.header = {"arm",           "validation\nloss", "time",           "froze after",
                  "sent per rank", "fp32\nring/sent",  "bf16\nring/sent"};
  for (const ArmSummary& summary : summaries) {
    const double reduction = summary.bytes_sent > 0.0 ? summary.ring_bytes / summary.bytes_sent : 0.0;
    const auto shown = [](double value) { return value > 0.0 ? fixed_text(value, 2) : "-"; };
    table.rows.push_back({summary.arm, final_loss(summary), duration_text(summary.seconds),
                          summary.frozen_at > 0.0 ? "step " + fixed_text(summary.frozen_at, 0) : "-",
                          short_count(summary.bytes_sent) + "B", shown(reduction), shown(reduction / 2.0)});
  }
  return table;
}

Table fine_tuning_table(const std::vector<ArmSummary>& summaries) {
  Table table;
  table.header = {"arm", "trained parameters", "loss of the base", "after fine-tuning", "change"};
  for (const ArmSummary& summary : summaries) {
    table.rows.push_back({summary.arm, with_thousands(static_cast<int64_t>(summary.parameters)),
                          with_error(fixed_text(summary.first_loss.mean, 4), summary.first_loss),
                          final_loss(summary),
                          with_error(signed_fixed(summary.change.mean, 4), summary.change)});
  }
  return table;
}

}  // namespace

std::vector<Table> tables_of(const std::vector<ArmSummary>& summaries, const std::vector<Run>& bases) {
  std::vector<Table> tables = {summary_table(summaries)};
  if (several_processes(summaries)) tables.push_back(traffic_table(summaries));
  if (!bases.empty()) tables.push_back(fine_tuning_table(summaries));
  return tables;
}

std::string fine_tuning_note(const std::vector<Run>& bases) {
  if (bases.empty()) return {};
  const ArmSummary base = summarize(bases).front();
  return "\nAll losses are those of the second text. The base has one of " + final_loss(base) +
         " on its own, after " + short_count(base.tokens) + " tokens of it in " +
         duration_text(base.seconds) +
         "; where its weights are in 4 bits,\nthe loss of the base is that of these.";
}

Table tensor_table(const Run& run) {
  Table table;
  if (run.tensors.empty()) return table;
  table.header = {"tensor", "elements", "coefficient", "factor", "scale of momentum"};
  for (const TensorScales& tensor : run.tensors) {
    table.rows.push_back({tensor.name, std::to_string(tensor.elements), significant(tensor.coefficient, 3),
                          significant(tensor.factor, 3), significant(tensor.momentum_scale, 3)});
  }
  return table;
}

std::string table_note(const std::vector<ArmSummary>& summaries) {
  std::string note =
      "Loss in nats per byte. Time is one run's training without validation; the step times are medians,\n"
      "the optimizer's with clipping";
  note += several_processes(summaries)
              ? ".\nOptimizer + network: of a step, the wait for what ranks send included.\n"
              : ". ";
  note += "Memory is what tensors of one rank take at the peak of a step.";
  if (summaries.size() > 1) {
    note += "\nDifference: of the loss, to " + summaries.front().arm + "'s.";
    note += "\nTime to loss: until the validation loss first was within 0.001 of the final one\nof " +
            summaries.front().arm + "; - for never.";
  }
  if (several_processes(summaries)) {
    note +=
        "\nSent per rank: bytes from one rank to others in one run, as a bandwidth-optimal collective\n"
        "sends them. fp32 ring/sent: what a ring of fp32 gradients sends in as many steps, over that;\n"
        "the bf16 ring sends half.";
  }
  for (const ArmSummary& summary : summaries) {
    if (summary.frozen_at <= 0.0 || summary.processes > 1) continue;  // else in the table
    note += "\n" + summary.arm + " froze its variance after step " + fixed_text(summary.frozen_at, 0) + ".";
  }
  for (const ArmSummary& summary : summaries) {
    if (summary.largest_update <= 0.0) continue;
    note += "\n" + summary.arm + ": no parameter moved by more than " +
            fixed_text(summary.largest_update, 1) + " learning rates in one step.";
  }
  if (!summaries.empty() && summaries.front().validation_loss.count > 1) {
    note += "\n± is the standard error over seeds; differences are taken seed by seed.";
  }
  return note;
}

namespace {

constexpr size_t kWidest = 100;  // characters

// The columns from `first` to before `end`, behind the first one.
std::string columns_as_text(const Table& table, const std::vector<size_t>& widths, size_t first, size_t end) {
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (size_t i = 0; i < end; i = i == 0 ? first : i + 1) {
      const std::string space(widths[i] - shown_width(cells[i]), ' ');
      text += i == 0 ? cells[i] + space : "  " + space + cells[i];
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::vector<std::string> upper, lower;
  bool has_two_lines = false;
  for (size_t i = 0; i < table.header.size(); ++i) {
    const std::string& title = table.header[i];
    const size_t break_at = title.find('\n');
    upper.push_back(break_at == std::string::npos ? "" : title.substr(0, break_at));
    lower.push_back(break_at == std::string::npos ? title : title.substr(break_at + 1));
    has_two_lines |= break_at != std::string::npos && (i == 0 || (i >= first && i < end));
  }
  std::string text = (has_two_lines ? line(upper) : "") + line(lower);
  size_t width = widths[0];
  for (size_t i = first; i < end; ++i) width += widths[i] + 2;
  for (size_t i = 0; i < width; ++i) text += "─";
  text += "\n";
  for (const auto& row : table.rows) text += line(row);
  return text;
}

}  // namespace

std::string as_text(const Table& table) {
  std::vector<size_t> widths;
  for (const auto& title : table.header) {
    const size_t break_at = std::min(title.find('\n'), title.size());
    widths.push_back(std::max(shown_width(title.substr(0, break_at)),
                              shown_width(title.substr(std::min(title.size(), break_at + 1)))));
  }
  for (const auto& row : table.rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], shown_width(row[i]));
  }
  std::string text;
  for (size_t first = 1, end = 1; first < widths.size(); first = end) {
    size_t width = widths[0];
    while (end < widths.size() && (end == first || width + widths[end] + 2 <= kWidest)) {
      width += widths[end++] + 2;
    }
    text += (first == 1 ? "" : "\n") + columns_as_text(table, widths, first, end);
  }
  return text;
}

}  // namespace convergence
