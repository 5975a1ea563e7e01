// Progressive layer dropping (Zhang & He, arXiv:2010.13369) as pure functions: which layers of a stack run at
// which step. The gate that runs or skips a layer is not here, and neither is any state: the same arguments
// give the same decision on every rank, after a resume, and when a block is recomputed.
#pragma once

#include <cstdint>

#include <torch/arg.h>

namespace pacer {

struct LayerDropOptions {
  LayerDropOptions() = default;
  // The share of layers kept by the deepest layer in the end, in (0, 1].
  TORCH_ARG(double, theta_bar) = 0.5;
  // How fast theta falls from 1 to theta_bar, per step; finite, >= 0. A rule of thumb: 100 / steps of the
  // whole run.
  TORCH_ARG(double, gamma) = 1e-3;
  // The seed of the random decisions.
  TORCH_ARG(uint64_t, seed) = 0;
};

// In all of these, `step` counts attempts completed, and `layer` counts from 0 up to `layers` - 1. They throw
// InvalidArgument for options out of range, a negative step, a layer outside the stack, and a micro-step
// outside [0, 2^24).

// (1 - theta_bar) exp(-gamma step) + theta_bar: 1 at step 0, then falling towards theta_bar.
double layer_drop_theta(const LayerDropOptions& options, int64_t step);

// 1 - (layer + 1) / layers * (1 - theta): deeper layers are dropped more often.
double keep_probability(const LayerDropOptions& options, int64_t layer, int64_t layers, int64_t step);

// floor(probability * 2^32) for a probability in [0, 1]. A layer is kept where its draw is below it: at
// probability 1 always, as no draw reaches 2^32.
uint64_t keep_threshold(double probability);

// 32 random bits for this layer and micro-step: word 0 of Philox4x32-10 (core/philox.h) in the stream
// layer_drop. The steps of a seed repeat after 2^32.
uint32_t layer_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step);

// Whether the layer runs in this micro-step.
bool keeps_layer(const LayerDropOptions& options, int64_t layer, int64_t layers, int64_t step,
                 int64_t micro_step);

}  // namespace pacer
