// report.html: one self-contained page with the table, the curves and the settings of a study. No network, no
// external files; it works with scripts switched off and follows the reader's light or dark preference.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "guidance.h"
#include "results.h"

namespace convergence {

struct StudyReport {
  std::string headline;  // one line under the title
  std::string date;      // as 2026-01-31
  std::string docs;      // the folder of the pages, as a link from the report names it; empty: not there
  std::vector<Hint> hints;
  std::vector<std::pair<std::string, std::string>> facts;  // text, model, machine, versions
  std::string settings;                                    // as an INI file
  std::vector<Run> runs;
  std::vector<Run> bases;  // which the runs went on from; empty where they did not
};

std::string report_as_html(const StudyReport& report);

}  // namespace convergence
