// The CPU loop over the elements of a tile, for every rule as math/adam.h says what that is: limited by memory
// when the clones vectorise. Nothing here rounds. Compile it with -O3 -fno-math-errno and -ffp-contract=off; without the
// last, results may differ from those of a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/cpu/target.h>

// The iterations of the loop that follows do not depend on each other. Pacer's own loops are compiled with
// -fopenmp-simd, which others need not.
#if defined(PACER_OPENMP_SIMD)
#define PACER_SIMD _Pragma("omp simd")
#elif defined(__clang__)
#define PACER_SIMD _Pragma("clang loop vectorize(assume_safety)")
#else
#define PACER_SIMD _Pragma("GCC ivdep")
#endif

namespace pacer::kernels {

// A tile's memory.
template <AdamStorage kStorage>
struct AdamRange {
  using Types = StorageOf<kStorage>;
  const typename Types::Param* gradient;
  typename Types::Param* parameter;
  typename Types::State* exp_avg;         // null for a rule of no moment
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
  if (tensor.exp_avg != nullptr)
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

template <class Rule, AdamStorage kStorage>
PACER_HOST_DEVICE void step_in_range(const AdamRange<kStorage>& range, int64_t i,
                                     const AdamScalars<typename StorageOf<kStorage>::Real>& scalars,
                                     uint32_t random16) {
  StoredElement<kStorage> e;
  e.gradient = range.gradient[i];
  e.parameter = range.parameter[i];
  if constexpr (kHasFirstMoment<Rule>) e.exp_avg = range.exp_avg[i];
  if constexpr (Rule::kSecondMoment) e.exp_avg_sq = range.exp_avg_sq[i];
  if constexpr (Rule::kMaxMoment) e.max_exp_avg_sq = range.max_exp_avg_sq[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) e.extra = range.extra[i];
  step_stored<Rule, kStorage>(e, scalars, random16);
  range.parameter[i] = e.parameter;
  if constexpr (kHasFirstMoment<Rule>) range.exp_avg[i] = e.exp_avg;
  if constexpr (Rule::kSecondMoment) range.exp_avg_sq[i] = e.exp_avg_sq;
  if constexpr (Rule::kMaxMoment) range.max_exp_avg_sq[i] = e.max_exp_avg_sq;
  if constexpr (StorageOf<kStorage>::kHasExtra) range.extra[i] = e.extra;
}

template <class Rule, AdamStorage kStorage>
PACER_TARGET_CLONES static void step_range(const AdamRange<kStorage>& r,
                                           const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  const AdamRange<kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const AdamScalars<typename StorageOf<kStorage>::Real> scalars = s;
  PACER_SIMD
  for (int64_t i = 0; i < range.count; ++i) step_in_range<Rule, kStorage>(range, i, scalars, 0);
}

template <class Rule>
PACER_TARGET_CLONES static void step_block(const AdamRange<AdamStorage::bf16_stochastic>& r,
                                           const AdamScalars<float>& s, int64_t begin, int64_t end,
                                           const uint16_t* random16) {
  const AdamRange<AdamStorage::bf16_stochastic> range = r;
  const AdamScalars<float> scalars = s;
  PACER_SIMD
  for (int64_t i = begin; i < end; ++i) {
    step_in_range<Rule, AdamStorage::bf16_stochastic>(range, i, scalars, random16[i - begin]);
  }
}

template <class Rule, AdamStorage kStorage>
void step_tile(const Tile& tile, const AdamTensor& tensor, const void* gradient,
               const AdamScalars<typename StorageOf<kStorage>::Real>& scalars) {
  const AdamRange<kStorage> range = range_of<kStorage>(tile, tensor, gradient);
  if constexpr (kStorage == AdamStorage::bf16_stochastic) {
    for_each_drawn_block(range, scalars, [&](int64_t begin, int64_t end, const uint16_t* random16) {
      step_block<Rule>(range, scalars, begin, end, random16);
    });
  } else {
    step_range<Rule, kStorage>(range, scalars);
  }
}

// What adam_cpu does, with another rule of pacer's. Throws InvalidArgument where the tensors lack its second moment.
template <class Rule>
void all_elements_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors,
                      const AdamGradient* gradients, const StepScalars* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  require(!Rule::kSecondMoment || tensors[tile.tensor].exp_avg_sq != nullptr,
          "the update rule has a second moment (kSecondMoment), which its states lack; construct its OwnRule "
          "with has_second_moment = true");
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto storage) {
    using Real = typename StorageOf<storage()>::Real;
    const auto& of_step = scalars[gradient.scalars].template as<AdamScalars<Real>>();
    if (of_step.skip) return;
    step_tile<Rule, storage()>(tile, tensors[tile.tensor], gradient.gradient, of_step);
  });
}

// The same with any rule, whose options are common ones.
template <class Rule>
void elements_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors,
                  const AdamGradient* gradients, const StepScalars* scalars) {
  static_assert(!Rule::kMaxMoment, "amsgrad is an option of Adam alone; set kMaxMoment to false");
  all_elements_cpu<Rule>(launch, tile, tensors, gradients, scalars);
}

}  // namespace pacer::kernels
