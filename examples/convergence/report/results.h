// What the study measures: the curves of one run, and what several runs of one arm say together. Plain data,
// made by training_curve.cpp, read by the table, the progress lines and the report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

struct CurvePoint {
  int64_t tokens;  // trained on so far
  double seconds;  // of training so far; validation does not count
  double value;    // of a loss: nats per byte
};
using Curve = std::vector<CurvePoint>;

// What is known of training at one moment. A value that was not measured is NaN.
struct TrainingPoint {
  int64_t step = 0;    // steps so far
  int64_t tokens = 0;  // trained on so far
  double seconds = 0.0;
  double loss = 0.0;             // nats per byte; the mean since the previous point
  double learning_rate = 0.0;    // of the last step
  double gradient_norm = 0.0;    // of the last step, before clipping
  double sequence_length = 0.0;  // of the last step
  double kept_layers = 0.0;      // in a step; the mean since the previous point
  double theta = 0.0;            // of layer dropping, in the last step
  double micro_steps = 0.0;      // of the last step
  double bytes_sent = 0.0;       // by this rank to others in training so far
  double memory_bytes = 0.0;     // that tensors of this rank take at the peak of a step; the median
  double optimizer_seconds =
      0.0;  // of a step: norm, clipping, optimizer; the median since the previous point
};

// What 1-bit LAMB did with one tensor, at the end of a run.
struct TensorScales {
  std::string name;
  int64_t elements = 0;
  double coefficient = 1.0;     // the mean of its trust ratios in warm-up
  double factor = 1.0;          // of the last step
  double momentum_scale = 1.0;  // before its momentum travels
};

struct Run {
  std::string arm;
  uint64_t seed = 0;
  int64_t processes = 1;
  int64_t parameters = 0;       // that are trained; 0: not known
  int64_t frozen_at = 0;        // after how many steps 1-bit Adam froze its variance; 0: it did not
  double largest_update = 0.0;  // see LargestUpdate; 0: nobody looked
  bool finished = false;
  std::vector<TrainingPoint> training;
  Curve validation;                   // the first at 0 tokens, the last at the end
  std::vector<TensorScales> tensors;  // none but for 1-bit LAMB

  double seconds() const { return training.empty() ? 0.0 : training.back().seconds; }
  double bytes_sent() const { return training.empty() ? 0.0 : training.back().bytes_sent; }  // by rank 0
  // What one rank sends in a run of as many steps whose gradients are averaged by a ring, in elements of so
  // many bytes.
  double ring_bytes(double element_bytes) const;
  double step_seconds() const;       // forward, backward, clipping, optimizer; the median
  double optimizer_seconds() const;  // the median
  double memory_bytes() const;       // of rank 0 at the peak of a step; the median, 0: not known
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
  Estimate first_loss;       // of validation, before training
  Estimate change;           // from the first to the last one, run by run
  Estimate difference;  // to the first arm, over pairs of runs with the same seed; count 0 for the first arm
  Estimate time_to_loss;  // see seconds_to; count 0 where any run never got there
  double tokens = 0.0;    // of one run; from here on means over runs
  double seconds = 0.0;
  double step_seconds = 0.0;
  double optimizer_seconds = 0.0;
  double memory_bytes = 0.0;    // see Run
  double bytes_sent = 0.0;      // by one rank in one run
  double parameters = 0.0;      // that are trained
  double ring_bytes = 0.0;      // that a ring in fp32 would have sent; 0: not known
  double frozen_at = 0.0;       // as in Run; 0 where not every run froze
  double largest_update = 0.0;  // of all runs
  int64_t processes = 1;
};

Estimate estimate(const std::vector<double>& values);
double median(std::vector<double> values);  // of those that are not NaN; 0 for none

// One summary per arm, in the order in which arms first appear in `runs`. The time to loss is that to
// within 0.001 of the final loss of the first arm's run with the same seed.
std::vector<ArmSummary> summarize(const std::vector<Run>& runs);

// When a curve first came down to `value`, on straight lines between its points; infinity for never.
double seconds_to(double value, const Curve& curve);

// The runs of one arm, in order.
std::vector<const Run*> runs_of(const std::vector<Run>& runs, const std::string& arm);

// One member of a run's training points, without those that are NaN.
Curve curve_of(const Run& run, double TrainingPoint::*member);

// The mean of curves that have the same token counts: tokens as they are, seconds and values averaged. Stops
// where the shortest stops.
Curve mean_curve(const std::vector<Curve>& curves);

// Exponential moving average over points, without the pull towards zero at the start.
Curve smooth(const Curve& curve, double decay);

}  // namespace convergence
