// Runs with state in 8 bits, whatever the optimizer, and what the tests of that format ask of such state.
#pragma once

#include <string>
#include <vector>

#include <pacer/optimizers/named_tensors.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

// An optimizer over copies of these values.
template <class Optimizer>
struct StateRun {
  std::vector<Tensor> parameters;
  Optimizer optimizer;

  StateRun(const std::vector<Tensor>& values, const OptionsOf<Optimizer>& options)
      : parameters(clones(values)), optimizer(parameters, options) {}
  void step(int steps, uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < steps; ++i) {
      set_random_gradients(parameters);
      optimizer.step();
    }
  }
  ParamStateOf<Optimizer>& state(size_t i = 0) { return state_of(optimizer, parameters[i]); }
};

template <class Optimizer>
OptionsOf<Optimizer> in_8_bits(double lr = 0.02) {
  return OptionsOf<Optimizer>(lr).state_bits(8);
}

inline const std::vector<std::vector<int64_t>> kStateShapes = {{}, {31}, {32}, {33}, {7, 19}, {0, 3}, {2500}};

// By name, as a file has them: row by row.
inline NamedTensors as_file(const NamedTensors& state) {
  NamedTensors file;
  for (const auto& [name, tensor] : state) file[name] = tensor.clone().contiguous();
  return file;
}

// The fp64 values of codes, from the format's card. They and their scales follow the memory order of a parameter that
// is contiguous.
inline Tensor decoded_moment(const Tensor& codes, const Tensor& scales, bool second) {
  const Tensor of_each = scales.to(at::kDouble).repeat_interleave(32).slice(0, 0, codes.numel());
  const Tensor code = codes.reshape({-1}).to(at::kDouble);
  const Tensor z = code / 127;
  const Tensor values = second ? (code / 255 * of_each).square() : z / (2 - z.abs()) * of_each;
  return values.view(codes.sizes());
}

}  // namespace pacer::testing
