// Dropout whose mask is never stored: whether an element is kept is a pure function of a seed and its index,
// so that backward, a recomputed forward and the CPU draw what forward drew (kernels take four neighbouring
// elements at a time, which share a draw of Philox4x32-10).
#pragma once

#include <cstdint>

#include <pacer/core/philox.h>
#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;  // an element whose draw is below is dropped; 0: none is
  float scale = 1;         // of those that are kept
};

// Dropped with probability p, 0 <= p < 1, to a resolution of 2^-32; others become 1 / (1 - p) times as large.
inline Dropout dropout_of(double p, uint64_t seed) {
  return {seed, static_cast<uint32_t>(p * 4294967296.0), static_cast<float>(1.0 / (1.0 - p))};
}

// Draws for elements 4 * four ... 4 * four + 3 of the tensor, in memory order.
PACER_HOST_DEVICE PhiloxCounter dropout_draws(const Dropout& dropout, int64_t four) {
  return philox4x32_10(philox_key(dropout.seed),
                       philox_counter(static_cast<uint64_t>(four), 0, 0, RandomStream::dropout));
}

PACER_HOST_DEVICE float drop(const Dropout& dropout, uint32_t draw, float value) {
  return draw < dropout.threshold ? 0.0f : mul_(value, dropout.scale);
}

}  // namespace pacer::kernels
