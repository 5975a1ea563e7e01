// Layer normalisation of one row, written once for the host and the device, and the order of its sums, which
// is part of the definition:
//
//   row       column j adds to accumulator j mod 8 L, ascending, L = layer_norm_lanes(columns)
//   eights    ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7)) of eight neighbouring accumulators: a lane
//   fold      acc[i] += acc[i + h] for h = 16 ... 1 in each 32 lanes, then the same way over those sums
//   columns   of a gradient of a parameter: rows of a part, ascending; then part p adds to accumulator
//             p mod 16, ascending, and these are folded
//
// The variance is the mean of squared deviations from the mean, each added by one fused multiply-add. With
// Normalization::rms the mean is 0 and nothing else differs: no sum of values, and none of dy * weight.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/choices.h>
#include <pacer/kernels/math/element_type.h>

namespace pacer::kernels {

constexpr int kLayerNormPiece = 8;  // neighbouring columns of a lane
constexpr int kLayerNormMostLanes = 512;
constexpr int kLayerNormWarp = 32;       // lanes that fold first
constexpr int kLayerNormPartLanes = 16;  // accumulators over parts

// Lanes that share a row: a power of two, by which a lane has at most 32 of up to 16,384 columns.
constexpr int layer_norm_lanes(int64_t columns) {
  int lanes = kLayerNormWarp;
  while (lanes < kLayerNormMostLanes && lanes * int64_t{32} < columns) lanes *= 2;
  return lanes;
}

// Rows that add up one after the other to a partial sum, the last part may have less. Long rows have fewer
// parts, so that these fill a GPU and partial sums stay a few percent of all bytes.
inline int64_t layer_norm_part_rows(int64_t rows, int64_t columns) {
  const int lanes = layer_norm_lanes(columns);
  const int64_t most = (lanes < 256 ? 32768 : 65536) / lanes;
  return rows <= most ? 1 : ceil_divide(rows, most);
}
inline int64_t layer_norm_parts(int64_t rows, int64_t columns) {
  return ceil_divide(rows, layer_norm_part_rows(rows, columns));
}

PACER_HOST_DEVICE float sum_of_eight(const float (&a)[kLayerNormPiece]) {
  return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

PACER_HOST_DEVICE float rstd_of(float squared_deviations, float columns, float epsilon) {
  return div_(1.0f, sqrt_(div_(squared_deviations, columns) + epsilon));
}
PACER_HOST_DEVICE float normalized(float s, float mean, float rstd) { return mul_(s - mean, rstd); }

// The gradient of one element, from the row's means of dy * weight and of dy * weight * normalized.
PACER_HOST_DEVICE float layer_norm_gradient(float dy_weight, float normalized, float rstd,
                                            float mean_gradient, float mean_product, float dsum) {
  return fma_(rstd, fma_(-mean_product, normalized, dy_weight - mean_gradient), dsum);
}

// Calls visit(std::integral_constant<Normalization, ...>{}) and returns its result.
template <class Visit>
auto with_normalization(Normalization normalization, const Visit& visit) {
  return normalization == Normalization::rms
             ? visit(std::integral_constant<Normalization, Normalization::rms>{})
             : visit(std::integral_constant<Normalization, Normalization::layer>{});
}

// Calls visit(stream, branch, parameter) with an element of each type and returns its result. Throws
// InvalidArgument for types that do not go together.
template <class Visit>
auto with_layer_norm_types(ElementType stream, ElementType branch, ElementType parameter,
                           const Visit& visit) {
  const bool is_wide = stream == ElementType::f32;
  require(
      is_wide || branch == stream,
      "layer normalisation of a 16-bit residual stream needs a branch of the same type; cast one of them");
  require(parameter == ElementType::f32 || parameter == stream,
          "layer normalisation needs parameters of 32 bits or of the type of the residual stream; cast them");
  if (is_wide) return with_element(branch, [&](auto element) { return visit(float{}, element, float{}); });
  const auto narrow = [&](auto element) {
    return parameter == ElementType::f32 ? visit(element, element, float{})
                                         : visit(element, element, element);
  };
  return stream == ElementType::bf16 ? narrow(BFloat16{}) : narrow(Float16{});
}

}  // namespace pacer::kernels
