// 8-bit floats by LibTorch's conversions, which do not saturate: what is too large is clamped before.
#pragma once

#include <limits>

#include <ATen/ops/where.h>

#include <pacer/kernels/fp8.h>

#include "support/optimizers.h"

namespace pacer::testing {

inline kernels::Fp8Source fp8_source(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernels::Fp8Source::f32;
  return dtype == at::kBFloat16 ? kernels::Fp8Source::bf16 : kernels::Fp8Source::f16;
}

// Codes (uint8) of x * scale.
inline Tensor fp8_codes(const Tensor& x, float scale, kernels::Fp8Format format) {
  const bool is_e4m3 = format == kernels::Fp8Format::e4m3;
  const double largest = is_e4m3 ? 448 : 57344;
  const Tensor scaled = x.to(at::kFloat) * scale;
  const Tensor codes = scaled.clamp(-largest, largest).to(is_e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
  return at::where(scaled.isnan(), at::full_like(scaled, 0x7F, at::kByte), codes.view(at::kByte));
}

inline uint32_t amax_bits(const Tensor& x) {
  uint32_t largest = 0;
  const Tensor wide = x.to(at::kFloat).abs().contiguous();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    largest = std::max(largest, kernels::magnitude_bits(wide.const_data_ptr<float>()[i]));
  }
  return largest;
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
