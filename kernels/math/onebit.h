// The rounding of numbers to signs times a scale, written once for the host and the device. Nothing here adds
// up: sums for scales are in the order of core/reduction_order.h.
#pragma once

#include <cstdint>

#include <pacer/kernels/choices.h>
#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// `scale` with the sign of `value`; plus for 0, -0 and NaN.
PACER_HOST_DEVICE float with_sign_of(float value, float scale) { return value < 0 ? -scale : scale; }

// What was lost when `carried` became a sign. The scale is known only after the last element was seen, so
// carried numbers are kept whole and this is computed when they are next read.
PACER_HOST_DEVICE float onebit_error(float carried, float scale) {
  return carried - with_sign_of(carried, scale);
}

// The same of a bit (1 for plus).
PACER_HOST_DEVICE float decode_sign(uint32_t bit, float scale) {
  return float_of(bits_of(scale) ^ ((bit ^ 1u) << 31));
}

// The scale of `count` real elements, from the sum of their squares (rms) or magnitudes (l1); 0 for none.
PACER_HOST_DEVICE float onebit_scale(ScaleNorm norm, double sum, int64_t count) {
  if (count == 0) return 0.0f;
  const double mean = div_(sum, static_cast<double>(count));
  return static_cast<float>(norm == ScaleNorm::rms ? sqrt_(mean) : mean);
}

// What a column of a sum takes in.
PACER_HOST_DEVICE float add_to_scale(ScaleNorm norm, float value, float sum) {
  return norm == ScaleNorm::rms ? fma_(value, value, sum) : sum + (value < 0 ? -value : value);
}

}  // namespace pacer::kernels
