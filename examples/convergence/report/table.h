// The summary of a study as a table of text: made once, shown on the terminal and in the report.
#pragma once

#include <string>
#include <vector>

#include "results.h"

namespace convergence {

struct Table {
  std::vector<std::string> header;             // a title may have two lines
  std::vector<std::vector<std::string>> rows;  // the first column is a name, the others are figures
};

// The summary; what was sent, beside loss and time, where there were several processes; and where fine-tuning
// began and how much of the model it trained, where the study has bases.
std::vector<Table> tables_of(const std::vector<ArmSummary>& summaries, const std::vector<Run>& bases);

// What the bases had learned before; empty where there are none.
std::string fine_tuning_note(const std::vector<Run>& bases);

// What 1-bit LAMB did with each tensor; empty for other runs.
Table tensor_table(const Run& run);

// What the columns mean, in a sentence or two.
std::string table_note(const std::vector<ArmSummary>& summaries);

// Aligned columns: names to the left, figures to the right. Where they take more than 100 characters, what is
// too much follows below, with the names once more.
std::string as_text(const Table& table);

}  // namespace convergence
