// A tile's memory in the CPU loops of one dtype set, and the random bits of stochastic rounding in blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>

namespace pacer::kernels {

template <AdamStorage kStorage>
struct AdamRange {
  using Types = StorageOf<kStorage>;
  const typename Types::Param* gradient;
  typename Types::Param* parameter;
  typename Types::State* exp_avg;
  typename Types::State* exp_avg_sq;      // null for a rule of one moment
  typename Types::State* max_exp_avg_sq;  // null without amsgrad
  typename Types::Extra* extra;           // null where there is none
  int64_t count;
  int64_t first_element;
};

template <AdamStorage kStorage>
AdamRange<kStorage> range_of(const Tile& tile, const AdamTensor& tensor, const void* gradient) {
  using Types = StorageOf<kStorage>;
  AdamRange<kStorage> range{};
  range.gradient = static_cast<const typename Types::Param*>(gradient) + tile.offset;
  range.parameter = static_cast<typename Types::Param*>(tensor.parameter) + tile.offset;
  range.exp_avg = static_cast<typename Types::State*>(tensor.exp_avg) + tile.offset;
  if (tensor.exp_avg_sq != nullptr) {
    range.exp_avg_sq = static_cast<typename Types::State*>(tensor.exp_avg_sq) + tile.offset;
  }
  if (tensor.max_exp_avg_sq != nullptr) {
    range.max_exp_avg_sq = static_cast<typename Types::State*>(tensor.max_exp_avg_sq) + tile.offset;
  }
  if constexpr (Types::kHasExtra)
    range.extra = static_cast<typename Types::Extra*>(tensor.master_or_remainder) + tile.offset;
  range.count = tile.count;
  range.first_element = tensor.first_element + tile.offset;
  return range;
}

constexpr int64_t kDrawsAtOnce = 64;

// random16[8 * d + h] = half-word h of draw first_draw + d, for d < kDrawsAtOnce.
void fill_random16(uint64_t seed, int64_t step, int64_t first_draw, uint16_t* random16);

// Calls block(begin, end, random16) for pieces of the range: the bits of element i are random16[i - begin].
template <class Scalars, class Block>
void for_each_drawn_block(const AdamRange<AdamStorage::bf16_stochastic>& range, const Scalars& scalars,
                          const Block& block) {
  constexpr int64_t kBlock = kDrawsAtOnce * kElementsPerDraw;
  uint16_t random16[kBlock];
  for (int64_t begin = 0; begin < range.count;) {
    const int64_t real_index = range.first_element + begin;
    const int64_t skipped = real_index % kElementsPerDraw;
    const int64_t end = std::min(range.count, begin + kBlock - skipped);
    fill_random16(scalars.seed, scalars.step, real_index / kElementsPerDraw, random16);
    block(begin, end, random16 + skipped);
    begin = end;
  }
}

}  // namespace pacer::kernels
