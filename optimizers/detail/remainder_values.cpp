#include <pacer/optimizers/detail/remainder_values.h>

#include <ATen/ops/where.h>

#include <pacer/kernels/math/weight_correction.h>

namespace pacer::detail {
namespace {

using at::Tensor;

// The bits of floats whose upper halves are given.
Tensor upper_half(const Tensor& rounded) {
  return rounded.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
}

Tensor joined_24(const Tensor& rounded, const Tensor& correction) {
  const Tensor high = upper_half(rounded), magnitude = high.bitwise_and(0x7FFFFFFF);
  const Tensor is_inward = correction.lt(0).ne(high.lt(0));
  const Tensor was_written = at::where(is_inward, magnitude.eq(0), magnitude.ge(0x7F800000));
  const Tensor distance = correction.to(at::kInt).abs().mul(33026).add(1 << 6).bitwise_right_shift(7);
  return high.add(at::where(is_inward, distance.neg(), distance).masked_fill(was_written, 0))
      .view(at::kFloat);
}

SplitValue split_value_24(const Tensor& value) {
  const Tensor bits = value.view(at::kInt), rounded = value.to(at::kBFloat16);
  const Tensor high = upper_half(rounded), apart = bits.sub(high), is_odd = high.bitwise_and(0x10000).ne(0);
  const Tensor nearest = apart.abs().mul(kernels::kLargestCorrection).add(1 << 14).bitwise_right_shift(15);
  const Tensor steps = at::where(is_odd, nearest.clamp_max(kernels::kLargestCorrection - 1), nearest);
  const Tensor is_negative = bits.lt(0).ne(apart.lt(0));
  const Tensor correction = at::where(is_negative, steps.neg(), steps).masked_fill(value.isnan(), 0);
  return {rounded, correction.to(at::kChar)};
}

}  // namespace

Tensor joined_value(const Tensor& rounded, const Tensor& remainder) {
  if (remainder.scalar_type() == at::kChar) return joined_24(rounded, remainder);
  const Tensor was_written = rounded.eq(0).logical_and(remainder.lt(0));
  return upper_half(rounded).add(remainder.to(at::kInt).masked_fill(was_written, 0)).view(at::kFloat);
}

SplitValue split_value(const Tensor& value, at::ScalarType remainder_dtype) {
  if (remainder_dtype == at::kChar) return split_value_24(value);
  const Tensor bits = value.view(at::kInt);
  const Tensor rounded = bits.add(0x8000).bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
  const Tensor is_nan = value.isnan();
  return {at::where(is_nan, value.to(at::kBFloat16), rounded),
          bits.bitwise_and(0xFFFF).masked_fill(is_nan, 0).to(at::kShort)};
}

}  // namespace pacer::detail
