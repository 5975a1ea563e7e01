// The random bits of stochastic rounding. The draws are computed as four arrays of words, which vectorises,
// and then interleaved.
#include <pacer/kernels/cpu/adam_range.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {

PACER_TARGET_CLONES void fill_random16(uint64_t seed, int64_t step, int64_t first_draw, uint16_t* random16) {
  alignas(64) uint32_t words[4][kDrawsAtOnce];
#pragma omp simd
  for (int64_t d = 0; d < kDrawsAtOnce; ++d) {
    const PhiloxCounter draw = rounding_draw(seed, step, first_draw + d);
    words[0][d] = draw.word[0];
    words[1][d] = draw.word[1];
    words[2][d] = draw.word[2];
    words[3][d] = draw.word[3];
  }
#pragma omp simd
  for (int64_t d = 0; d < kDrawsAtOnce; ++d) {
    for (int64_t w = 0; w < 4; ++w) {
      random16[kElementsPerDraw * d + 2 * w] = static_cast<uint16_t>(words[w][d]);
      random16[kElementsPerDraw * d + 2 * w + 1] = static_cast<uint16_t>(words[w][d] >> 16);
    }
  }
}

}  // namespace pacer::kernels
