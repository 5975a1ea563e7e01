// Philox4x32-10, the counter-based generator behind every random decision of pacer (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC'11). A draw is a pure function of key and counter: there is no
// state to save, and the CPU, the GPU and every rank see the same numbers.
#pragma once

#include <cstdint>

#include <pacer/core/host_device.h>

namespace pacer {

// The 128 bits that number a draw.
struct PhiloxCounter {
  // The low word comes first.
  uint32_t word[4];
};

// The 64 bits of a seed.
struct PhiloxKey {
  // The low word comes first.
  uint32_t word[2];
};

// What a draw is for: the part of the counter that keeps two uses of one seed apart.
enum class RandomStream : uint32_t {
  layer_drop = 0,
  stochastic_rounding = 1,
  epoch_order = 2,
  dropout = 3,
  row_drop = 4,
  batch_order = 5
};

// Ten rounds: 128 random bits for this key and counter.
PACER_HOST_DEVICE PhiloxCounter philox4x32_10(PhiloxKey key, PhiloxCounter counter) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter.word[2];
    const uint32_t high0 = static_cast<uint32_t>(product0 >> 32), low0 = static_cast<uint32_t>(product0);
    const uint32_t high1 = static_cast<uint32_t>(product1 >> 32), low1 = static_cast<uint32_t>(product1);
    counter = {{high1 ^ counter.word[1] ^ key.word[0], low1, high0 ^ counter.word[3] ^ key.word[1], low0}};
    key.word[0] += kWeyl0;
    key.word[1] += kWeyl1;
  }
  return counter;
}

// The key of a seed.
PACER_HOST_DEVICE PhiloxKey philox_key(uint64_t seed) {
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
}

// The counter of draw `index` at step `step`:
// {index low, index high, step mod 2^32, micro_step + 2^24 * stream}.
PACER_HOST_DEVICE PhiloxCounter philox_counter(uint64_t index, uint64_t step, uint32_t micro_step,
                                               RandomStream stream) {
  return {{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(step),
           micro_step + (static_cast<uint32_t>(stream) << 24)}};
}

}  // namespace pacer
