#include "result.h"

#include <algorithm>

#include "support/table.h"

namespace bench::kernels {
namespace {

using Row = std::vector<std::string>;

// What the rows and columns of a table are, in the order in which they first appear.
struct Axes {
  Row peers;
  Row kinds;
  bool has_update = false;
};

void add_new(Row& names, const std::string& name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

Axes axes_of(const std::vector<const CaseResult*>& results) {
  Axes axes;
  for (const auto* result : results) {
    for (const auto& measurement : result->measurements) {
      if (&measurement != result->own()) add_new(axes.peers, measurement.contender);
      for (const auto& timing : measurement.timings) {
        add_new(axes.kinds, timing.kind);
        axes.has_update = axes.has_update || timing.ceiling.update > 0;
      }
    }
  }
  return axes;
}

Row head(const Axes& axes) {
  Row row = {"model",    "tensors",    "M params", "threads", "time",
             "pacer ms", "[min, max]", "GB/s",     "copy",    "of copy"};
  if (axes.has_update) row.insert(row.end(), {"in place", "of in place"});
  for (const auto& peer : axes.peers) row.insert(row.end(), {peer, "x"});
  return row;
}

void add_fraction(Row& row, double speed, double ceiling) {
  row.push_back(ceiling > 0 ? format("%.1f", ceiling / 1e9) : "-");
  row.push_back(ceiling > 0 ? format("%.1f %%", 100 * speed / ceiling) : "-");
}

Row row_of(const CaseResult& result, const std::string& kind, const Axes& axes) {
  const ModelShapes model = result.which.model();
  const Timing* own = result.own() ? result.own()->find(kind) : nullptr;
  Row row = {model.title, std::to_string(model.shapes.size()),
             format("%.1f", static_cast<double>(model.parameters()) / 1e6),
             result.threads == 0 ? "-" : std::to_string(result.threads), kind};
  if (own) {
    const Spread& ms = own->milliseconds;
    row.push_back(milliseconds_text(ms.median));
    row.push_back("[" + milliseconds_text(ms.min) + ", " + milliseconds_text(ms.max) + "]");
    const double speed = result.bytes_per_second(*own);
    row.push_back(own->ceiling.copy > 0 ? format("%.1f", speed / 1e9) : "-");
    add_fraction(row, speed, own->ceiling.copy);
    if (axes.has_update) add_fraction(row, speed, own->ceiling.update);
  } else {
    row.insert(row.end(), axes.has_update ? 7 : 5, "-");
  }
  for (const auto& peer : axes.peers) {
    const Measurement* other = result.find(peer);
    const Timing* time = other ? other->find(kind) : nullptr;
    row.push_back(time ? milliseconds_text(time->milliseconds.median) : "-");
    row.push_back(time && own ? format("%.2f", time->milliseconds.median / own->milliseconds.median) : "-");
  }
  return row;
}

}  // namespace

const Timing* Measurement::find(const std::string& kind) const {
  const auto found =
      std::find_if(timings.begin(), timings.end(), [&](const Timing& t) { return t.kind == kind; });
  return found == timings.end() ? nullptr : &*found;
}

const Measurement* CaseResult::find(const std::string& contender) const {
  const auto found = std::find_if(measurements.begin(), measurements.end(),
                                  [&](const Measurement& m) { return m.contender == contender; });
  return found == measurements.end() ? nullptr : &*found;
}

const Measurement* CaseResult::own() const { return find(which.work == Work::norm ? "pacer norm" : "pacer"); }

double CaseResult::bytes_per_second(const Timing& timing) const {
  const double bytes =
      facts_of(which.work).bytes_per_parameter * static_cast<double>(which.model().parameters());
  return bytes / (timing.milliseconds.median * 1e-3);
}

std::string table_of(const std::vector<const CaseResult*>& results) {
  const Axes axes = axes_of(results);
  std::vector<Row> rows = {head(axes)};
  for (const auto& kind : axes.kinds) {
    for (const auto* result : results) {
      const bool has_kind = std::any_of(result->measurements.begin(), result->measurements.end(),
                                        [&](const Measurement& m) { return m.find(kind) != nullptr; });
      if (has_kind) rows.push_back(row_of(*result, kind, axes));
    }
  }
  return aligned(rows);
}

}  // namespace bench::kernels
