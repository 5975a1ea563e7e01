// What a person watches while a run goes on: a bar that rewrites its line on a terminal, one line per
// validation elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "results.h"

namespace convergence {

class Progress {
 public:
  // `name` is what the lines begin with ("adamw, seed 1").
  Progress(std::string name, int64_t tokens);

  void on_training(const TrainingPoint& point);
  void on_validation(const CurvePoint& point);

  // Ends the bar with one line that says how the run went.
  void finish(const Run& run);

 private:
  void draw_bar();
  void clear_bar();

  std::string name_;
  int64_t tokens_;
  bool terminal_;
  TrainingPoint training_;
  double loss_sum_ = 0.0;  // of the training points since the last validation
  int64_t points_ = 0;
  CurvePoint validation_{0, 0.0, 0.0};
};

}  // namespace convergence
