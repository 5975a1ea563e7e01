// What the model says, as a table, as JSON and as a drawing.
#pragma once

#include <string>
#include <vector>

#include "step_time.h"

namespace scaling {

struct Setting {
  Workload work;
  Machine machine;
  Link between;
  int64_t ranks_per_node = 1;
  WarmUp warm_up;
  std::string title;
};

std::string table(const Setting& setting, const std::vector<Row>& rows);
// One JSON object a line, for each number of ranks and scheme.
std::string json_lines(const std::vector<Row>& rows);
// An SVG file that stands alone.
std::string drawing(const Setting& setting, const std::vector<Row>& rows);

}  // namespace scaling
