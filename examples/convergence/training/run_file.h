// The files of one run: metrics.jsonl, from which a finished run can be read back, and settings.ini, which
// says whether a stored run is one of the study at hand.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <pacer/files/json_lines.h>

#include "convergence/report/results.h"
#include "convergence/settings.h"

namespace convergence {

// Writes metrics.jsonl, one line per point, from the first point on: until then an older file stays.
class RunFile {
 public:
  explicit RunFile(const std::filesystem::path& folder) : path_((folder / "metrics.jsonl").string()) {}

  void write_training(const TrainingPoint& point);
  void write_validation(const CurvePoint& point);
  void write_end(const Run& run);

 private:
  void write(const pacer::JsonLine& line);

  std::string path_;
  std::optional<pacer::JsonLinesFile> file_;
};

// What a run left in its folder; without points where there is none. Throws pacer::FileError for lines that
// RunFile did not write; an incomplete last one is passed over.
Run read_run(const std::filesystem::path& folder, const std::string& arm, uint64_t seed);

// Throws pacer::InvalidArgument naming the first setting that shapes a run and is another in the settings.ini
// of the run's folder.
void require_same_settings(const std::filesystem::path& folder, const Settings& settings);

}  // namespace convergence
