// Rounding to signs and back on the CPU, a row or less at a time: what the level-1 cache holds. A sign is a
// bit of a mask where the processor compares into masks (AVX-512), or the top bit of a compared lane (AVX2);
// elsewhere a loop goes bit by bit. All versions compute the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/onebit.h>

namespace pacer::kernels {

constexpr int kSignsInByte = 8;
// How far ahead of its use memory is asked for, in elements: while a row is rounded, the next one's source
// runs soon, and nobody else would fetch what that one carries.
constexpr int kSignsPrefetch = 2048;

// Element i of `count`: carried[i] = values[i] + what was lost of carried[i] with `scale`; columns[i] takes
// it in, or with kFirst begins with it; bit i of `signs` is its sign. What the last byte has beyond `count`
// is plus.
struct SignRounding {
  const float* values;
  float scale;
  int64_t count;
  float* carried;
  float* columns;
  unsigned char* signs;
};

// From element `begin`, a multiple of 8, on.
template <ScaleNorm kNorm, bool kFirst>
void round_to_signs_one_by_one(const SignRounding& r, int64_t begin = 0) {
  for (; begin < r.count; begin += kSignsInByte) {
    const int64_t end = begin + kSignsInByte < r.count ? begin + kSignsInByte : r.count;
    unsigned minus = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float sum = r.values[i] + onebit_error(r.carried[i], r.scale);
      r.carried[i] = sum;
      r.columns[i] = add_to_scale(kNorm, sum, kFirst ? 0.0f : r.columns[i]);
      minus |= (sum < 0 ? 1u : 0u) << (i - begin);
    }
    r.signs[begin / kSignsInByte] = static_cast<unsigned char>(~minus);
  }
}

// values[i] = `scale` with sign i of `signs`, or with kAdd values[i] += it, for i from `begin`, a multiple of
// 8, to before `count`.
template <bool kAdd>
void decode_signs_one_by_one(const unsigned char* signs, int64_t count, float scale, float* values,
                             int64_t begin = 0) {
  for (int64_t i = begin; i < count; ++i) {
    const float value = decode_sign((signs[i / kSignsInByte] >> (i % kSignsInByte)) & 1u, scale);
    values[i] = kAdd ? values[i] + value : value;
  }
}

#if defined(__x86_64__)

#define PACER_TARGET_AVX2_FMA __attribute__((target("avx2,fma")))
#define PACER_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw")))

template <ScaleNorm kNorm, bool kFirst>
PACER_TARGET_AVX2_FMA void round_to_signs_avx2(const SignRounding& rounding) {
  constexpr int kLanes = 8;
  const SignRounding r = rounding;
  const __m256 zero = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
  const __m256 plus = _mm256_set1_ps(r.scale), minus = _mm256_set1_ps(-r.scale);
  int64_t i = 0;
  for (; i + kLanes <= r.count; i += kLanes) {
    _mm_prefetch(reinterpret_cast<const char*>(r.carried + i + kSignsPrefetch), _MM_HINT_T0);
    const __m256 carried = _mm256_loadu_ps(r.carried + i);
    const __m256 rounded = _mm256_blendv_ps(plus, minus, _mm256_cmp_ps(carried, zero, _CMP_LT_OQ));
    const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(r.values + i), _mm256_sub_ps(carried, rounded));
    _mm256_storeu_ps(r.carried + i, sum);
    const __m256 column = kFirst ? zero : _mm256_loadu_ps(r.columns + i);
    _mm256_storeu_ps(r.columns + i, kNorm == ScaleNorm::rms
                                        ? _mm256_fmadd_ps(sum, sum, column)
                                        : _mm256_add_ps(column, _mm256_andnot_ps(sign, sum)));
    r.signs[i / kSignsInByte] =
        static_cast<unsigned char>(_mm256_movemask_ps(_mm256_cmp_ps(sum, zero, _CMP_NLT_UQ)));
  }
  round_to_signs_one_by_one<kNorm, kFirst>(r, i);
}

template <ScaleNorm kNorm, bool kFirst>
PACER_TARGET_AVX512 void round_to_signs_avx512(const SignRounding& rounding) {
  constexpr int kLanes = 16;
  const SignRounding r = rounding;
  const __m512 zero = _mm512_setzero_ps();
  const __m512 plus = _mm512_set1_ps(r.scale), minus = _mm512_set1_ps(-r.scale);
  int64_t i = 0;
  for (; i + kLanes <= r.count; i += kLanes) {
    _mm_prefetch(reinterpret_cast<const char*>(r.carried + i + kSignsPrefetch), _MM_HINT_T0);
    const __m512 carried = _mm512_loadu_ps(r.carried + i);
    const __m512 rounded = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(carried, zero, _CMP_LT_OQ), plus, minus);
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(r.values + i), _mm512_sub_ps(carried, rounded));
    _mm512_storeu_ps(r.carried + i, sum);
    const __m512 column = kFirst ? zero : _mm512_loadu_ps(r.columns + i);
    _mm512_storeu_ps(r.columns + i, kNorm == ScaleNorm::rms ? _mm512_fmadd_ps(sum, sum, column)
                                                            : _mm512_add_ps(column, _mm512_abs_ps(sum)));
    const auto signs = static_cast<uint16_t>(_mm512_cmp_ps_mask(sum, zero, _CMP_NLT_UQ));
    std::memcpy(r.signs + i / kSignsInByte, &signs, sizeof signs);
  }
  round_to_signs_one_by_one<kNorm, kFirst>(r, i);
}

template <bool kAdd>
PACER_TARGET_AVX2_FMA void decode_signs_avx2(const unsigned char* signs, int64_t count, float scale,
                                             float* values) {
  constexpr int kLanes = 8;
  const __m256i bit_of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(signs[i / kSignsInByte]), bit_of_lane);
    const __m256 is_plus = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, bit_of_lane));
    const __m256 value = _mm256_blendv_ps(minus, plus, is_plus);
    _mm256_storeu_ps(values + i, kAdd ? _mm256_add_ps(_mm256_loadu_ps(values + i), value) : value);
  }
  decode_signs_one_by_one<kAdd>(signs, count, scale, values, i);
}

template <bool kAdd>
PACER_TARGET_AVX512 void decode_signs_avx512(const unsigned char* signs, int64_t count, float scale,
                                             float* values) {
  constexpr int kLanes = 16;
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint16_t bits;
    std::memcpy(&bits, signs + i / kSignsInByte, sizeof bits);
    const __m512 value = _mm512_mask_blend_ps(bits, minus, plus);
    _mm512_storeu_ps(values + i, kAdd ? _mm512_add_ps(_mm512_loadu_ps(values + i), value) : value);
  }
  decode_signs_one_by_one<kAdd>(signs, count, scale, values, i);
}

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
inline bool has_avx2_and_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#endif

// Both in the version that is the fastest on this processor.
template <ScaleNorm kNorm, bool kFirst>
void round_to_signs(const SignRounding& r) {
#if defined(__x86_64__)
  if (has_avx512()) return round_to_signs_avx512<kNorm, kFirst>(r);
  if (has_avx2_and_fma()) return round_to_signs_avx2<kNorm, kFirst>(r);
#endif
  round_to_signs_one_by_one<kNorm, kFirst>(r);
}

template <bool kAdd>
void decode_signs(const unsigned char* signs, int64_t count, float scale, float* values) {
#if defined(__x86_64__)
  if (has_avx512()) return decode_signs_avx512<kAdd>(signs, count, scale, values);
  if (has_avx2_and_fma()) return decode_signs_avx2<kAdd>(signs, count, scale, values);
#endif
  decode_signs_one_by_one<kAdd>(signs, count, scale, values);
}

}  // namespace pacer::kernels
