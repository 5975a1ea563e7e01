// What the study measures: the curves of one run, and what several runs of one arm say together. Plain data,
// made by training.cpp, read by the table, the progress lines and the report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

struct CurvePoint {
  int64_t tokens;  // trained on so far
  double seconds;  // of training so far; validation does not count
  double loss;     // nats per byte
};

struct Run {
  std::string arm;
  uint64_t seed = 0;
  std::vector<CurvePoint> training;    // mean loss since the previous point
  std::vector<CurvePoint> validation;  // the first at 0 tokens, the last at the end
  double seconds = 0.0;                // training, without validation
  double step_seconds = 0.0;           // one step: forward, backward, clipping, optimizer; the median
  double optimizer_seconds = 0.0;      // one optimizer step; the median
};

// A mean over runs with its standard error, which is 0 and meaningless where `count` is 1.
struct Estimate {
  double mean = 0.0;
  double standard_error = 0.0;
  int64_t count = 0;
};

struct ArmSummary {
  std::string arm;
  Estimate validation_loss;  // at the end
  Estimate difference;  // to the first arm, over pairs of runs with the same seed; count 0 for the first arm
  double tokens = 0.0;  // of one run; from here on means over runs
  double seconds = 0.0;
  double step_seconds = 0.0;
  double optimizer_seconds = 0.0;
};

Estimate estimate(const std::vector<double>& values);
double median(std::vector<double> values);  // 0 for none

// One summary per arm, in the order in which arms first appear in `runs`.
std::vector<ArmSummary> summarize(const std::vector<Run>& runs);

// The runs of one arm, in order.
std::vector<const Run*> runs_of(const std::vector<Run>& runs, const std::string& arm);

// The mean curve over runs that have the same token counts: tokens as they are, seconds and loss averaged.
// Stops where the shortest stops.
std::vector<CurvePoint> mean_curve(const std::vector<const Run*>& runs, std::vector<CurvePoint> Run::*curve);

// Exponential moving average over points, without the pull towards zero at the start.
std::vector<CurvePoint> smooth(const std::vector<CurvePoint>& curve, double decay);

}  // namespace convergence
