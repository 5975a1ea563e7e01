// The list of benchmark cases: which model with which dtypes on which device, and how a case is called.
#pragma once

#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "support/shapes.h"

namespace bench::kernels {

enum class Device { cpu, cuda };

// What is measured, and in which dtypes.
enum class Work {
  fp32,
  fp32_checked,  // with the finite check
  norm,          // the gradient norm and finite check alone, fp32
  fp64,
  bf16_master,
  bf16_remainder,
  bf16_stochastic,
  bf16,
  lamb,       // fp32
  fp32_8bit,  // moments in 8 bits
  bf16_remainder_8bit,
  bf16_24_8bit,  // the same with corrections of 8 bits
  sgd,           // with momentum, fp32
  rmsprop,       // with momentum, fp32
};

struct WorkFacts {
  Work work;
  std::string name;              // in case names: "bf16-master"
  std::string title;             // in tables
  double bytes_per_parameter;    // each stream once: the least a step can move
  int peak_bytes_per_parameter;  // of memory, everything a case holds at a time, for the check before it
                                 // starts
  at::ScalarType type;           // of parameters and gradients
  double tolerance;              // of the relative error of what contenders compute
};

const WorkFacts& facts_of(Work work);

struct Case {
  Device device;
  ModelShapes (*model)();
  Work work;
  bool quick;        // part of --quick
  std::string name;  // "cuda/gpt2/bf16-master"
};

std::vector<Case> all_cases();

// How long cases are measured.
struct Effort {
  bool quick = false;
  int threads = 0;          // of the CPU cases; 0: one, then all
  int64_t repetitions = 0;  // 0: enough for the device
};

}  // namespace bench::kernels
