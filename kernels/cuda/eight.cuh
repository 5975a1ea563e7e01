// Eight neighbouring elements of a row in a thread's registers, as they lie in memory: the unit of kernels
// over activations. 16-bit elements stay packed in pairs, because a GPU converts and compares two at once.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/fp8.h>

namespace pacer::kernels {

template <class Element>
struct Eight {
  uint32_t words[2 * sizeof(Element)];
};

// From and to memory that is aligned to 16 bytes.
template <class Element>
__device__ __forceinline__ Eight<Element> load_eight(const Element* memory) {
  Eight<Element> eight;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(Element)) / 2; ++k) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(memory) + k);
    eight.words[4 * k] = words.x;
    eight.words[4 * k + 1] = words.y;
    eight.words[4 * k + 2] = words.z;
    eight.words[4 * k + 3] = words.w;
  }
  return eight;
}
template <class Element>
__device__ __forceinline__ void store_eight(Element* memory, const Eight<Element>& eight) {
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(Element)) / 2; ++k) {
    // The compiler takes a plain store apart where it is conditional.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(memory + 16 / sizeof(Element) * k),
                 "r"(eight.words[4 * k]), "r"(eight.words[4 * k + 1]), "r"(eight.words[4 * k + 2]),
                 "r"(eight.words[4 * k + 3]));
  }
}

__device__ __forceinline__ void widen(const Eight<float>& eight, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = float_of(eight.words[i]);
}
__device__ __forceinline__ void widen(const Eight<BFloat16>& eight, float (&values)[8]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    values[2 * w] = float_of(eight.words[w] << 16);
    values[2 * w + 1] = float_of(eight.words[w] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void widen(const Eight<Float16>& eight, float (&values)[8]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    __half2 pair;
    memcpy(&pair, &eight.words[w], sizeof pair);
    const float2 wide = __half22float2(pair);
    values[2 * w] = wide.x;
    values[2 * w + 1] = wide.y;
  }
}

// Rounded to nearest even.
__device__ __forceinline__ void narrow(const float (&values)[8], Eight<float>& eight) {
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.words[i] = bits_of(values[i]);
}
__device__ __forceinline__ void narrow(const float (&values)[8], Eight<BFloat16>& eight) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * w], values[2 * w + 1]);
    memcpy(&eight.words[w], &pair, sizeof pair);
  }
}
__device__ __forceinline__ void narrow(const float (&values)[8], Eight<Float16>& eight) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const __half2 pair = __floats2half2_rn(values[2 * w], values[2 * w + 1]);
    memcpy(&eight.words[w], &pair, sizeof pair);
  }
}

// The largest magnitude of many eights; bits() are those of kernels/math/fp8.h.
template <class Element>
class Largest;
template <>
class Largest<float> {
 public:
  __device__ __forceinline__ void note(const Eight<float>& eight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits_ = max(bits_, eight.words[i] & 0x7FFFFFFFu);
  }
  __device__ __forceinline__ uint32_t bits() const { return magnitude_bits(float_of(bits_)); }

 private:
  uint32_t bits_ = 0;
};
// Pair: two packed elements of the GPU's own type, of which max gives NaN if there is one.
template <class Element, class Pair>
class LargestPair {
 public:
  __device__ __forceinline__ void note(const Eight<Element>& eight) {
    Pair largest;
    memcpy(&largest, &words_.words[0], sizeof largest);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      Pair pair;
      memcpy(&pair, &eight.words[w], sizeof pair);
      largest = __hmax2_nan(largest, __habs2(pair));
    }
    memcpy(&words_.words[0], &largest, sizeof largest);
  }
  __device__ __forceinline__ uint32_t bits() const {
    float values[8];
    widen(words_, values);
    return max(magnitude_bits(values[0]), magnitude_bits(values[1]));
  }

 private:
  Eight<Element> words_ = {};  // of which only the first is used
};
template <>
class Largest<BFloat16> : public LargestPair<BFloat16, __nv_bfloat162> {};
template <>
class Largest<Float16> : public LargestPair<Float16, __half2> {};

// Codes of eight values, four to a word, the first one lowest.
template <Fp8Format kFormat>
__device__ __forceinline__ void encode_eight(const float (&values)[8], float scale, uint32_t (&codes)[2]) {
  constexpr auto kKind = kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const auto pair = [&](int i) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(mul_(values[i], scale), mul_(values[i + 1], scale)),
                                    __NV_SATFINITE, kKind);
  };
#pragma unroll
  for (int w = 0; w < 2; ++w) codes[w] = pair(4 * w) | pair(4 * w + 2) << 16;
}
// To memory that is aligned to 8 bytes.
__device__ __forceinline__ void store_codes(uint8_t* memory, const uint32_t (&codes)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(memory), "r"(codes[0]), "r"(codes[1]));
}

}  // namespace pacer::kernels
