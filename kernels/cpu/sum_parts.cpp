#include <pacer/kernels/cpu/sum_parts.h>

#include <algorithm>

#include <pacer/kernels/math/layer_norm.h>

namespace pacer::kernels {

void sum_parts(const float* partials, int64_t parts, int64_t columns, int64_t begin, int64_t end, float* to) {
  constexpr int64_t kBlock = 64;  // columns at once, whose accumulators stay in the first-level cache
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    float accumulators[kLayerNormPartLanes][kBlock] = {};
    for (int64_t part = 0; part < parts; ++part) {
      float* const sums = accumulators[part % kLayerNormPartLanes];
      const float* const from = partials + part * columns + first;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
    }
    for (int h = kLayerNormPartLanes / 2; h >= 1; h /= 2) {
      for (int lane = 0; lane < h; ++lane) {
#pragma omp simd
        for (int64_t i = 0; i < kBlock; ++i) accumulators[lane][i] += accumulators[lane + h][i];
      }
    }
    std::copy_n(accumulators[0], count, to + first);
  }
}

}  // namespace pacer::kernels
