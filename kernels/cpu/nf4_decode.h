// Decoding blocks of NF4 on the CPU. A block has only 16 different values: the caller has made them, already
// rounded, and they are looked up by shuffles of bytes where the processor has them (AVX2), else one by one.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/nf4.h>

namespace pacer::kernels {

// `count` elements of a block, in any number. `table`: the block's 16 values, by code.
template <class Element>
void decode_nf4_block(const uint8_t* codes, const Element* table, int64_t count, Element* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = table[i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15];
}

#if defined(__x86_64__)

#define PACER_TARGET_AVX2 __attribute__((target("avx2")))

// The 64 codes of a block, a byte each, in two vectors: elements 0-15 and 32-47, 16-31 and 48-63.
struct Nf4Bytes {
  __m256i first, second;
};
PACER_TARGET_AVX2 inline Nf4Bytes spread_nf4(const uint8_t* codes) {
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i low_half = _mm256_set1_epi8(15);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_half);
  const __m256i lower = _mm256_and_si256(packed, low_half);
  return {_mm256_unpacklo_epi8(upper, lower), _mm256_unpackhi_epi8(upper, lower)};
}

// Lower and upper halves of two vectors.
PACER_TARGET_AVX2 inline void store_nf4_halves(__m256i a, __m256i b, void* lower, void* upper) {
  _mm256_storeu_si256(static_cast<__m256i*>(lower), _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(static_cast<__m256i*>(upper), _mm256_permute2x128_si256(a, b, 0x31));
}

// Elements of 2 bytes.
template <class Element>
PACER_TARGET_AVX2 void decode_nf4_blocks_avx2(const uint8_t* codes, const Element* tables, int64_t blocks,
                                              Element* out) {
  static_assert(sizeof(Element) == 2);
  const __m256i low_byte = _mm256_set1_epi16(0xFF);
  for (int64_t block = 0; block < blocks; ++block, codes += kNf4Block / 2, out += kNf4Block) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tables + 16 * block));
    // [lower bytes of 0-7, upper bytes of 0-7 | of 8-15], then both kinds once in each half.
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(values, low_byte), _mm256_srli_epi16(values, 8)), 0xD8);
    const __m256i low = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    const __m256i high = _mm256_permute2x128_si256(bytes, bytes, 0x11);
    const Nf4Bytes spread = spread_nf4(codes);
    const __m256i vectors[2] = {spread.first, spread.second};
    for (int k = 0; k < 2; ++k) {
      const __m256i lows = _mm256_shuffle_epi8(low, vectors[k]);
      const __m256i highs = _mm256_shuffle_epi8(high, vectors[k]);
      store_nf4_halves(_mm256_unpacklo_epi8(lows, highs), _mm256_unpackhi_epi8(lows, highs), out + 16 * k,
                       out + 32 + 16 * k);
    }
  }
}

// Eight at a time: both halves of the table are looked up, and the code's upper bit chooses.
PACER_TARGET_AVX2 inline void decode_nf4_blocks_avx2(const uint8_t* codes, const float* tables,
                                                     int64_t blocks, float* out) {
  const __m256i shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
  for (int64_t block = 0; block < blocks; ++block, codes += kNf4Block / 2, out += kNf4Block) {
    const __m256 lower = _mm256_loadu_ps(tables + 16 * block);
    const __m256 upper = _mm256_loadu_ps(tables + 16 * block + 8);
    for (int i = 0; i < kNf4Block; i += 8) {
      int32_t word;
      std::copy_n(codes + i / 2, 4, reinterpret_cast<uint8_t*>(&word));
      const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
      const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, code),
                                                 _mm256_permutevar8x32_ps(upper, code), is_upper));
    }
  }
}

#endif

// `count` elements from the first of a block on. `tables`: 16 values for each block, by code.
template <class Element>
void decode_nf4_blocks(const uint8_t* codes, const Element* tables, int64_t count, Element* out) {
  int64_t done = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    decode_nf4_blocks_avx2(codes, tables, count / kNf4Block, out);
    done = count / kNf4Block * kNf4Block;
  }
#endif
  for (; done < count; done += kNf4Block) {
    decode_nf4_block(codes + done / 2, tables + done / kNf4Block * 16, std::min(kNf4Block, count - done),
                     out + done);
  }
}

}  // namespace pacer::kernels
