// Measurements over several bandwidths, kept in a CSV file, and what they say: a table and a chart beside
// the times that the bytes and the bandwidth alone would give.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace slow_network {

// Of one optimizer over one kind of links.
struct Measurement {
  std::string model, optimizer, backend;
  int64_t ranks = 0;
  double gbit = 0;          // that a link carries each way, per second; 0: as fast as it goes
  double milliseconds = 0;  // of a step: the slowest rank's, the median over steps
  int64_t bytes_sent = 0;   // in a step, by the rank that sends most; by a host over the link its ranks share
  int64_t steps = 0;        // measured
};

// Adds to the file, which begins with the names of its columns. Throws pacer::FileError.
void append(const std::string& path, const std::vector<Measurement>& measurements);
// Throws pacer::FileError where it cannot be read, pacer::InvalidArgument that names the line where a line is
// none of append's.
std::vector<Measurement> read_measurements(const std::string& path);

// The time without shaping plus the time that the bytes need: what a step takes where nothing overlaps. 0
// where the links are as fast as they go, or that was not measured.
double expected_milliseconds(const Measurement& measurement, const std::vector<Measurement>& all);

// One table for each number of ranks.
std::string as_tables(const std::vector<Measurement>& measurements);
// Step time over bandwidth for one number of ranks, as SVG; empty with fewer than two bandwidths.
std::string as_chart(const std::vector<Measurement>& measurements, int64_t ranks);

}  // namespace slow_network
