// What pacer-bench prints and writes: a line as each result comes, tables at the end, JSON lines.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/files/json_lines.h>

#include "result.h"

namespace bench::kernels {

class Report {
 public:
  // An empty path writes no JSON. Throws pacer::FileError.
  explicit Report(const std::string& json_path);

  // Facts of the environment, in order.
  void environment(const std::vector<std::pair<std::string, std::string>>& facts);

  // Printed at once, so that a run that is broken off has not been in vain.
  void bandwidth(const std::string& which, const std::string& what, double bytes_per_second);
  void progress(const CaseResult& result, const Measurement& measurement);
  void failed(const std::string& which, const std::string& why);
  // Whether the bytes that a case needs are free; else it is skipped, and this says so.
  bool has_room(const std::string& which, const char* memory, int64_t needed, int64_t free);

  void add(CaseResult result);
  void print_tables() const;

  bool all_well() const { return failures_.empty(); }

 private:
  void say(const std::string& which, const std::string& text);

  std::vector<CaseResult> results_;
  std::vector<std::string> failures_;
  std::unique_ptr<pacer::JsonLinesFile> json_;
};

}  // namespace bench::kernels
