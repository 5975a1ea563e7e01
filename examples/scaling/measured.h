// Steps that were measured, as lines of a CSV file, beside what the model says of them; and kernels as
// pacer-bench kernels --json measured them.
#pragma once

#include <string>
#include <vector>

#include "step_time.h"

namespace scaling {

// Columns of the file, one line a measurement; lines that begin with # are comments.
//   machine,model,rule,scheme,ranks,ranks_per_node,gbit,compute_ms,ranks_per_core,ms,use,source
// gbit: of a node's link over TCP, each way, 0 with a single node. compute_ms: forward and backward, which
// the exchange may hide behind. use: calibration (constants of the machine were fitted to it), validation, or
// missed (the model is off by more than a tenth; the source says why).
struct Measured {
  std::string machine, model, rule, scheme, use, source;
  int64_t ranks = 0, ranks_per_node = 0;
  double gbit = 0, compute = 0, ranks_per_core = 0, milliseconds = 0;
};

// Throws pacer::FileError for a file that cannot be read, and InvalidArgument with the line's number for one
// that is no measurement.
std::vector<Measured> read_measured(const std::string& path);
// Milliseconds. Throws pacer::InvalidArgument where the model knows no such step.
double predicted(const Measured& measured);
// All of them with what the model says, and how many of each use lie within a tenth.
std::string comparison(const std::vector<Measured>& all);

// The machine with the copy bandwidth, and the share of it that AdamW's kernel reaches, of a file that
// pacer-bench kernels --json has written: its largest fp32 case. Throws pacer::FileError where it has none.
Machine with_kernels(Machine machine, const std::string& path);

constexpr double kForwardShare = 1.0 / 3;  // of forward and backward together

}  // namespace scaling
