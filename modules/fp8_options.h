// How layers of pacer::modules compute in 8-bit floats (FP8): formats, and how the scales of tensors are
// chosen.
#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

namespace pacer {

// Where the scale of a tensor comes from. Weights always have their own, made anew once a step.
enum class Fp8Recipe {
  // The largest magnitudes of the last steps: one pass over a tensor. A tensor without a history is measured.
  delayed,
  // The largest magnitude of the tensor itself: nothing to save, and one more pass over each tensor.
  current,
};

struct Fp8Options {
  Fp8Options() = default;
  TORCH_ARG(Fp8Recipe, recipe) = Fp8Recipe::delayed;
  // How many steps delayed scaling looks back, 1 to 1024.
  TORCH_ARG(int64_t, amax_history) = 16;
  // The newest of them decides instead of the largest.
  TORCH_ARG(bool, newest_only) = false;
  // Powers of two between the largest magnitude and the largest 8-bit number, 0 to 16: room for a tensor that
  // grows. It costs range, not precision.
  TORCH_ARG(int64_t, margin) = 1;
  // Scales are powers of two, so that scaling itself rounds nothing.
  TORCH_ARG(bool, power_of_two) = true;
  // The format of gradients: Float8_e5m2 (more range) or Float8_e4m3fn (more precision). Activations and
  // weights are Float8_e4m3fn.
  TORCH_ARG(at::ScalarType, gradients) = at::kFloat8_e5m2;
  // How many of the model's first and last pacer::modules::Linear stay in 16 bits, in the order of
  // registration.
  TORCH_ARG(int64_t, keep_first) = 0;
  TORCH_ARG(int64_t, keep_last) = 0;
  // Layers whose weights are in 4 bits (nf4.h) take part, and count among the first and last. Their weights
  // are decoded and cast anew for each product, and nothing of that is kept. False: such layers compute in 16
  // bits.
  TORCH_ARG(bool, quantized_weights) = false;
};

}  // namespace pacer
