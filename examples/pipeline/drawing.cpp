#include "drawing.h"

#include <algorithm>
#include <cmath>

#include "support/svg.h"

namespace pipeline {
namespace {

using namespace examples::svg;

constexpr double kLeft = 60, kTop = 66, kRowHeight = 30, kPlotWidth = 1000, kLeastSlot = 3, kMostSlot = 34;
constexpr double kLeastLettered = 12;  // width of a box that a letter or number fits into

// Colours keep apart for colour-blind readers (after Okabe and Ito) and follow light and dark.
constexpr char kStyle[] =
    "<style>text{font:13px system-ui,sans-serif;fill:#3d4450}.title{font-size:16px;font-weight:600}"
    "rect{stroke:#fff;stroke-width:.8}.idle{fill:#8b93a0;fill-opacity:.15}.in{font-size:11px;fill:#fff}"
    ".F{fill:#0072b2}.B{fill:#c04f00}.I{fill:#c04f00}.W{fill:#007f5f}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d0da}rect{stroke:#15181d}.in{fill:#15181d}"
    ".F{fill:#56b4e9}.B{fill:#ff9249}.I{fill:#ff9249}.W{fill:#35c79c}}</style>\n";

char letter_of(pacer::PipelinePass pass) {
  switch (pass) {
    case pacer::PipelinePass::forward:
      return 'F';
    case pacer::PipelinePass::backward:
      return 'B';
    case pacer::PipelinePass::backward_input:
      return 'I';
    case pacer::PipelinePass::backward_weight:
      return 'W';
  }
  return '?';
}

// a ... z, then aa, ab ...
std::string chunk_letters(int64_t chunk) {
  std::string letters(1, static_cast<char>('a' + chunk % 26));
  return chunk < 26 ? letters : chunk_letters(chunk / 26 - 1) + letters;
}

std::string number_and_chunk(const pacer::PipelineAction& action, int64_t chunks) {
  return std::to_string(action.micro_batch) + (chunks > 1 ? chunk_letters(action.chunk) : "");
}

std::string legend(const std::vector<pacer::PipelinePlan>& plans) {
  bool has_halves = false;
  for (const pacer::PipelineAction& action : plans.front()) {
    has_halves = has_halves || action.pass == pacer::PipelinePass::backward_weight;
  }
  std::vector<std::pair<std::string, std::string>> entries = {{"F", "forward"}};
  if (has_halves) {
    entries.insert(entries.end(), {{"I", "backward, input half"}, {"W", "backward, weight half"}});
  } else {
    entries.emplace_back("B", "backward");
  }
  entries.emplace_back("idle", "idle");
  std::string svg;
  double x = kLeft;
  constexpr double kEntryWidth = 190, kSquare = 12;
  for (const auto& [kind, name] : entries) {
    svg += rectangle(kind, x, 38, kSquare, kSquare) + text_at("name", x + kSquare + 6, 48, "start", name);
    x += kEntryWidth;
  }
  return svg;
}

}  // namespace

std::string text_drawing(const std::vector<pacer::PipelinePlan>& plans, int64_t chunks,
                         const pacer::PipelineSimulation& simulated) {
  const auto slots = static_cast<size_t>(std::llround(simulated.total));
  std::vector<std::vector<std::string>> cells(plans.size(), std::vector<std::string>(slots, "."));
  size_t width = 0;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    for (size_t i = 0; i < plans[rank].size(); ++i) {
      const pacer::PipelineAction& action = plans[rank][i];
      const std::string cell = letter_of(action.pass) + number_and_chunk(action, chunks);
      width = std::max(width, cell.size());
      const auto begin = std::llround(simulated.intervals[rank][i].begin);
      const auto end = std::llround(simulated.intervals[rank][i].end);
      for (auto slot = begin; slot < end; ++slot) cells[rank][static_cast<size_t>(slot)] = cell;
    }
  }
  const size_t digits = std::to_string(plans.size() - 1).size();
  std::string text;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    std::string line = std::to_string(rank);
    line = "rank " + std::string(digits - line.size(), ' ') + line + " |";
    size_t blanks = 1;
    for (const std::string& cell : cells[rank]) {
      line += std::string(blanks, ' ') + cell;
      blanks = width - cell.size() + 1;
    }
    text += line + "\n";
  }
  return text;
}

std::string svg_drawing(const std::string& title, const std::vector<pacer::PipelinePlan>& plans,
                        int64_t chunks, const pacer::PipelineSimulation& simulated) {
  const double slot = std::clamp(kPlotWidth / std::max(1.0, simulated.total), kLeastSlot, kMostSlot);
  const double width = kLeft + std::max(720.0, slot * simulated.total) + 10;
  const double height = kTop + kRowHeight * static_cast<double>(plans.size()) + 10;
  std::string svg = kStyle + text_at("title", 0, 20, "start", title) + legend(plans);
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const double y = kTop + kRowHeight * static_cast<double>(rank);
    constexpr double kBoxHeight = kRowHeight - 4;
    svg += text_at("name", kLeft - 8, y + 18, "end", "rank " + std::to_string(rank)) +
           rectangle("idle", kLeft, y, slot * simulated.total, kBoxHeight);
    for (size_t i = 0; i < plans[rank].size(); ++i) {
      const pacer::PipelineAction& action = plans[rank][i];
      const auto& [begin, end] = simulated.intervals[rank][i];
      const double x = kLeft + slot * begin, box_width = slot * (end - begin);
      // Later chunks are paler.
      const double opacity = 1 - 0.4 * static_cast<double>(action.chunk) / static_cast<double>(chunks);
      const std::string kind(1, letter_of(action.pass)), label = number_and_chunk(action, chunks);
      svg += rectangle(kind, x, y, box_width, kBoxHeight, kind + label,
                       opacity < 1 ? attribute("fill-opacity", pixels(opacity)) : "");
      if (box_width >= kLeastLettered + 5 * static_cast<double>(label.size() - 1)) {
        svg += text_at("in", x + box_width / 2, y + 17, "middle", label);
      }
    }
  }
  return picture(title, width, height, svg);
}

}  // namespace pipeline
