// The numbers in the options of a parameter group, by name, as Vary sets them: which there are in the optimizers of
// pacer and of torch, and why some must stay as they are while a run goes on.
#pragma once

#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/option_fields.h>

namespace pacer::detail {

struct MovingNumber {
  const char* name;
  double* value;  // in the options
  Range range;
  const char* fixed = nullptr;  // the end of a sentence: why it must not move; null where it may
  // Whether what is frozen with the variance of a 1-bit optimizer follows from it.
  bool enters_freeze = false;
};

// Returns the numbers that the rule of these options reads. It returns none where the options are neither pacer's nor
// those of torch's Adam, AdamW, SGD, RMSprop or Adagrad.
std::vector<MovingNumber> moving_numbers(torch::optim::OptimizerOptions& options);

// Throws InvalidArgument where these options cannot have that value; `where` begins the sentence.
void check_moving_number(const std::string& where, const torch::optim::OptimizerOptions& options,
                         const std::string& name, double value);

}  // namespace pacer::detail
