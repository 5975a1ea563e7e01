// Layer dropping as pure functions: which layers of a stack run at which step, as in progressive layer
// dropping (Zhang & He, arXiv:2010.13369), or which rows of a batch keep what a layer adds, as in stochastic
// depth (Huang et al., arXiv:1603.09382). The gate that runs or skips a layer is not here, and neither is any
// state: the same arguments give the same decision after a resume, on every device, and when a block is
// recomputed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/progress.h>
#include <pacer/schedulers/learning_rate_schedule.h>

namespace pacer {

// How much of 1 - theta layer i of L is dropped with.
enum class DropDepth {
  linear,      // (i + 1) / L, as in progressive layer dropping
  from_zero,   // i / (L - 1), as the drop-path rates of timm; 0 for a single layer
  uniform,     // 1
  exponential  // 2^(i / (L - 1)) - 1, as in LayerSkip (arXiv:2404.16710); 0 for a single layer
};

// Setters check nothing; the functions below and LayerDrop refuse what is out of range, and two settings of
// which one would be without effect.
struct LayerDropOptions {
  LayerDropOptions() = default;
  // The share of layers kept by the deepest layer in the end, in (0, 1]. With a schedule it is the share where
  // its factor is 1.
  TORCH_ARG(double, theta_bar) = 0.5;
  // How fast theta falls from 1 to theta_bar, per step; finite, >= 0; 0.001 unless set. A rule of thumb: 100 /
  // steps of the whole run.
  TORCH_ARG(std::optional<double>, gamma);
  // In place of gamma: 1 - theta is 1 - theta_bar times the schedule's factor, by steps or by tokens. So
  // constant_schedule() drops alike throughout, and warmup_linear({0, N}) falls to no dropping after N steps.
  TORCH_ARG(std::optional<LearningRateSchedule>, schedule);
  // Which layers are dropped more than others; DropDepth::linear unless set.
  TORCH_ARG(std::optional<DropDepth>, depth);
  // In place of depth: only so many last layers are dropped, and these alike; from 1 to all.
  TORCH_ARG(std::optional<int64_t>, last_layers);
  // In place of depth: the share of 1 - theta that each layer is dropped with, in [0, 1], one for each layer.
  TORCH_ARG(std::optional<std::vector<double>>, shares);
  // Drop path: every layer runs, and each row of its input (the first dimension) keeps or drops what it adds.
  TORCH_ARG(bool, per_sample) = false;
  // The seed of the random decisions.
  TORCH_ARG(uint64_t, seed) = 0;
};

// In all of these, `layer` counts from 0 up to `layers` - 1. They throw InvalidArgument for options out of
// range, negative steps and tokens, a layer outside the stack, and a micro-step outside [0, 2^24).

// (1 - theta_bar) exp(-gamma step) + theta_bar: 1 at step 0, then falling towards theta_bar. With a schedule
// 1 - (1 - theta_bar) factor(progress).
double layer_drop_theta(const LayerDropOptions& options, const Progress& progress);

// What `depth`, `last_layers` or `shares` say of this layer, in [0, 1].
double depth_share(const LayerDropOptions& options, int64_t layer, int64_t layers);

// 1 - depth_share(layer) (1 - theta): how often the layer is kept.
double keep_probability(const LayerDropOptions& options, int64_t layer, int64_t layers,
                        const Progress& progress);

// floor(probability * 2^32) for a probability in [0, 1]. A layer is kept where its draw is below it: at
// probability 1 always, as no draw reaches 2^32.
uint64_t keep_threshold(double probability);

// 32 random bits for this layer and micro-step: word 0 of Philox4x32-10 (core/philox.h) in the stream
// layer_drop. The steps of a seed repeat after 2^32.
uint32_t layer_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step);

// Whether the layer runs in the micro-step at `progress`.
bool keeps_layer(const LayerDropOptions& options, int64_t layer, int64_t layers, const Progress& progress);

// 32 random bits for this row of a rank's micro-batch: word row mod 4 of Philox4x32-10 in the stream row_drop,
// with index 2^48 layer + 2^28 rank + floor(row / 4). Throws InvalidArgument, besides, for a layer outside
// [0, 2^16), a rank outside [0, 2^20) and a row outside [0, 2^30).
uint32_t row_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step, int64_t rank,
                       int64_t row);

// Which of the first `rows` rows of this rank keep what the layer adds, in the micro-step at `progress`.
std::vector<bool> keeps_rows(const LayerDropOptions& options, int64_t layer, int64_t layers,
                             const Progress& progress, int64_t rank, int64_t rows);

}  // namespace pacer
