// The arithmetic of a batch norm whose batch lies in several parts: the moments of a part, those of the batch, and what
// each part does with them, without a graph. How parts hear of each other is not known here. On a GPU all of it is
// LibTorch's kernels (at::batch_norm_stats and those beside it). On a CPU these have no counterpart: moments and sums
// are joined in fp64 there, between LibTorch's kernels for plain batch norm.
//
// C: channels, x [N, C, ...], dense in its memory order. S: the dtype of statistics and parameters, Double for an x of Double, else Float.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// S.
at::ScalarType statistics_type(const at::Tensor& x);
// How many values each channel has in this part.
int64_t values_per_channel(const at::Tensor& x);

// What the parts send: [2 C + 1]. CPU, fp64: means, variances (divided by the number of values) and that number. GPU,
// S: means, 1 / sqrt(variance + eps) and the number, of which a part without values says almost nothing.
at::Tensor part_moments(const at::Tensor& x, double eps);
// The number of values per channel in all parts, from [parts, 2 C + 1]. Waits for the device.
double values_of_all(const at::Tensor& moments);

// The moments of a batch.
struct BatchMoments {
  at::Tensor mean;      // S [C]
  at::Tensor variance;  // S [C], divided by the number of values; CPU only
  at::Tensor inverse;   // S [C], 1 / sqrt(variance + eps)
  at::Tensor counts;    // int32 [parts], values per channel; GPU only
  double values = 0;    // their sum; CPU only
};
// Running statistics, S [C], undefined where there are none, and how far they move towards those of the batch.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;
};
// From [parts, 2 C + 1], in the order of parts, so that all parts get the same bits; moves the running statistics.
BatchMoments join_moments(const at::Tensor& moments, const at::Tensor& x, const RunningStatistics& running,
                          double eps);

// (x - mean) / sqrt(variance + eps) * weight + bias, in the dtype and memory order of x. weight, bias: S [C], both may
// be undefined.
at::Tensor normalize_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          const BatchMoments& moments, double eps);

// What backward adds up in a part, with the gradients of weight and bias, which mean nothing where these are undefined.
struct PartSums {
  at::Tensor sums;  // [2 C], the sums of dy and of dy times (CPU, fp64) the normalised x or (GPU, S) x - mean
  at::Tensor weight, bias;  // S [C]
};
PartSums part_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                   const BatchMoments& moments, double eps);
// The gradient of x, from the sums over all parts.
at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                          const BatchMoments& moments, const at::Tensor& sums);

}  // namespace pacer::detail
