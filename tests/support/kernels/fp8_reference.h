// 8-bit floats by LibTorch's conversions, which do not saturate: what is too large is clamped before.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <pacer/kernels/fp8.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

inline kernels::ElementType element_type_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernels::ElementType::f32;
  return dtype == at::kBFloat16 ? kernels::ElementType::bf16 : kernels::ElementType::f16;
}

// Codes (uint8) of x * scale.
inline Tensor fp8_codes(const Tensor& x, float scale, kernels::Fp8Format format) {
  const bool is_e4m3 = format == kernels::Fp8Format::e4m3;
  const double largest = is_e4m3 ? 448 : 57344;
  const Tensor scaled = x.to(at::kFloat) * scale;
  const Tensor codes = scaled.clamp(-largest, largest).to(is_e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
  return at::where(scaled.isnan(), at::full_like(scaled, 0x7F, at::kByte), codes.view(at::kByte));
}

// A state of delayed scaling whose history has led to that scale.
inline kernels::Fp8Scale fp8_scale_of(float scale) {
  kernels::Fp8Scale state;
  state.scale = scale;
  state.count = 1;
  return state;
}

inline uint32_t amax_bits(const Tensor& x) {
  uint32_t largest = 0;
  const Tensor wide = x.to(at::kFloat).abs().contiguous();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    largest = std::max(largest, kernels::magnitude_bits(wide.const_data_ptr<float>()[i]));
  }
  return largest;
}

// What dropout leaves of a matrix, in fp32.
inline Tensor fp8_dropped(const Tensor& x, const kernels::Dropout& dropout) {
  const Tensor dropped = x.to(at::kFloat).clone();
  float* values = dropped.mutable_data_ptr<float>();
  for (int64_t i = 0; i < dropped.numel(); ++i) {
    const uint32_t draw = kernels::dropout_draws(dropout, i / 4).word[i % 4];
    values[i] = draw < dropout.threshold ? 0.0f : values[i] * dropout.scale;
  }
  return dropped;
}

// Sums of columns in the order of kernels/fp8.h, by operators on whole rows.
inline Tensor fp8_tree(Tensor lists) {
  while (lists.size(0) > 1) {
    lists = lists.slice(0, 0, c10::nullopt, 2) + lists.slice(0, 1, c10::nullopt, 2);
  }
  return lists[0];
}
inline Tensor fp8_column_sums(const Tensor& x) {
  std::vector<Tensor> strands(8, at::zeros({x.size(1)}));
  for (int64_t part = 0; part < kernels::fp8_parts(x.size(0)); ++part) {
    const int64_t rows = std::min<int64_t>(128, x.size(0) - 128 * part);
    const Tensor all = at::zeros({128, x.size(1)});
    all.narrow(0, 0, rows).copy_(x.narrow(0, 128 * part, rows));
    const Tensor fours = all.view({32, 4, -1});
    const Tensor sums = ((fours.select(1, 0) + fours.select(1, 1)) + fours.select(1, 2)) + fours.select(1, 3);
    Tensor& strand = strands[static_cast<size_t>(part % 8)];
    strand = strand + fp8_tree(sums);
  }
  return fp8_tree(at::stack(strands));
}

// All 65,536 numbers of a 16-bit dtype.
inline Tensor all_numbers(at::ScalarType dtype) {
  return at::arange(-32768, 32768, at::kInt).to(at::kShort).view(dtype);
}
// Of fp32 those around every tie and bound: upper 17 bits of all kinds, with lower bits that decide ties.
inline Tensor telling_floats() {
  const Tensor upper = at::arange(0, 1 << 17, at::kLong) * (1 << 15);
  std::vector<Tensor> all;
  for (const int64_t lower : {0, 1, 0x3FFF, 0x4000, 0x4001, 0x7FFF}) all.push_back(upper + lower);
  const Tensor bits = at::cat(all);
  return at::where(bits >= (int64_t{1} << 31), bits - (int64_t{1} << 32), bits).to(at::kInt).view(at::kFloat);
}

inline std::vector<float> fp8_scales() {
  std::vector<float> scales = {0.3f, 1.7f, 448.0f, 1e-30f, 1e30f};
  for (int power = -18; power <= 18; ++power) scales.push_back(std::ldexp(1.0f, power));
  return scales;
}

}  // namespace pacer::testing
