// The elements of a whole packet as words of memory, taken apart and put together with the fewest instructions: for the short
// way of coded_loop.cuh. All of it gives the bits of adam_storage.h and moment_codes.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <pacer/kernels/cuda/coded_packet.cuh>

namespace pacer::kernels {

// Elements of 2 bytes, two to a word.
template <int N>
struct HalfWords {
  uint32_t word[N / 2];

  template <class T>
  __device__ __forceinline__ explicit HalfWords(const T (&elements)[N]) {
    static_assert(sizeof(elements) == sizeof(word));
    memcpy(word, elements, sizeof word);
  }
  // The bits of element k above 16 zeros.
  __device__ __forceinline__ uint32_t high(int k) const {
    return k % 2 == 0 ? word[k / 2] << 16 : word[k / 2] & 0xFFFF0000u;
  }
};

// Element k as a float.
template <int N>
__device__ __forceinline__ float element_of(const float (&elements)[N], int k) {
  return elements[k];
}
template <int N>
__device__ __forceinline__ float element_of(const Float16 (&elements)[N], int k) {
  return to_float(elements[k]);
}
template <int N>
__device__ __forceinline__ float element_of(const BFloat16 (&elements)[N], int k) {
  return float_of(HalfWords<N>(elements).high(k));
}

// Codes of a byte, each as decode_shifted takes it: where they have a sign, 128 is added.
template <int N>
class ShiftedCodes {
 public:
  template <class Code>
  __device__ __forceinline__ explicit ShiftedCodes(const Code (&codes)[N]) {
    static_assert(sizeof(codes) == sizeof(word_));
    memcpy(word_, codes, sizeof word_);
    if constexpr (std::is_signed_v<Code>) {
#pragma unroll
      for (uint32_t& word : word_) word ^= 0x80808080u;
    }
  }
  // 2^23 + code.
  __device__ __forceinline__ float at(int k) const {
    return float_of(__byte_perm(word_[k / 4], 0x4B000000u, 0x7540u | static_cast<unsigned>(k % 4)));
  }

 private:
  uint32_t word_[N / 4];
};

// The parameters of a packet, read and written once each.
template <AdamStorage kStorage, int N>
struct OrdinaryParameters {
  StoredElement<kStorage> stored[N];

  template <class Packet>
  __device__ __forceinline__ float load(const Packet& packet, int k) {
    stored[k] = packet.element(k);
    return load_parameter(stored[k]);
  }
  __device__ __forceinline__ void store(float value, uint32_t random16, int k) {
    store_parameter(value, random16, stored[k]);
  }
  __device__ __forceinline__ bool all_were() const { return true; }
  template <class Packet>
  __device__ __forceinline__ void finish(Packet& packet) const {
#pragma unroll
    for (int k = 0; k < N; ++k) packet.set_element(k, stored[k]);
  }
};

// bf16 with a remainder: numbers only, which all_were() says. What join() would have found to be written by somebody else is
// none.
template <int N>
struct OrdinaryParameters<AdamStorage::bf16_remainder, N> {
  uint32_t bits[N];
  float sum_of_zeros = 0;  // NaN where a parameter was no number

  template <class Packet>
  __device__ __forceinline__ float load(const Packet& packet, int k) {
    const int32_t remainder = static_cast<int32_t>(HalfWords<N>(packet.extra).high(k)) >> 16;
    return float_of(HalfWords<N>(packet.parameter).high(k) + static_cast<uint32_t>(remainder));
  }
  __device__ __forceinline__ void store(float value, uint32_t, int k) {
    bits[k] = bits_of(value);
    sum_of_zeros = fma_(value, 0.0f, sum_of_zeros);
  }
  __device__ __forceinline__ bool all_were() const { return sum_of_zeros == 0.0f; }
  template <class Packet>
  __device__ __forceinline__ void finish(Packet& packet) const {
    uint32_t rounded[N / 2], remainder[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const uint32_t low = bits[2 * k], high = bits[2 * k + 1];
      rounded[k] = __byte_perm(low + 0x8000u, high + 0x8000u, 0x7632u);
      remainder[k] = __byte_perm(low, high, 0x5410u);
    }
    memcpy(packet.parameter, rounded, sizeof rounded);
    memcpy(packet.extra, remainder, sizeof remainder);
  }
};

// The same with a correction in 8 bits.
template <int N>
struct OrdinaryParameters<AdamStorage::bf16_correction, N> {
  uint32_t high[N];
  int32_t correction[N];
  float sum_of_zeros = 0;  // NaN where a parameter was no number

  template <class Packet>
  __device__ __forceinline__ float load(const Packet& packet, int k) {
    return float_of(join_24_unwritten(HalfWords<N>(packet.parameter).high(k), packet.extra[k]));
  }
  __device__ __forceinline__ void store(float value, uint32_t, int k) {
    const HighAndCorrection both = split_24_number(bits_of(value));
    high[k] = both.high;
    correction[k] = both.correction;
    sum_of_zeros = fma_(value, 0.0f, sum_of_zeros);
  }
  __device__ __forceinline__ bool all_were() const { return sum_of_zeros == 0.0f; }
  template <class Packet>
  __device__ __forceinline__ void finish(Packet& packet) const {
    uint32_t rounded[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; ++k) rounded[k] = __byte_perm(high[2 * k], high[2 * k + 1], 0x7632u);
    memcpy(packet.parameter, rounded, sizeof rounded);
#pragma unroll
    for (int k = 0; k < N; ++k) packet.extra[k] = static_cast<int8_t>(correction[k]);
  }
};

}  // namespace pacer::kernels
