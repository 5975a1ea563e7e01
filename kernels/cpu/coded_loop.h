// The CPU loop over groups of elements whose moments lie in memory as codes, for a rule of two moments (math/adam.h) and a
// format such as that of math/moment_codes.h. A group is decoded, updated and encoded while it is in the core's own
// cache. Compile it as element_loop.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {

// The memory of whole groups.
template <class Format, AdamStorage kStorage>
struct CodedGroups {
  using Types = StorageOf<kStorage>;
  const typename Types::Param* gradient;
  typename Types::Param* parameter;
  typename Types::Extra* extra;  // null where there is none
  typename Format::FirstCode* exp_avg;
  typename Format::SecondCode* exp_avg_sq;
  Float16* exp_avg_scale;
  Float16* exp_avg_sq_scale;

  // From element `first` of a tensor on, a multiple of the group.
  static CodedGroups of(const AdamTensor& tensor, const void* gradient, int64_t first) {
    CodedGroups groups{};
    groups.gradient = static_cast<const typename Types::Param*>(gradient) + first;
    groups.parameter = static_cast<typename Types::Param*>(tensor.parameter) + first;
    if constexpr (Types::kHasExtra)
      groups.extra = static_cast<typename Types::Extra*>(tensor.master_or_remainder) + first;
    groups.exp_avg = static_cast<typename Format::FirstCode*>(tensor.exp_avg) + first;
    groups.exp_avg_sq = static_cast<typename Format::SecondCode*>(tensor.exp_avg_sq) + first;
    groups.exp_avg_scale = static_cast<Float16*>(tensor.exp_avg_scale) + first / Format::kGroup;
    groups.exp_avg_sq_scale = static_cast<Float16*>(tensor.exp_avg_sq_scale) + first / Format::kGroup;
    return groups;
  }
};

// One element: its moments are left for the group to encode. A function of its own, so that the loop over it vectorises.
template <class Rule, class Format, AdamStorage kStorage>
PACER_HOST_DEVICE void step_coded_element(const CodedGroups<Format, kStorage>& range, int64_t i,
                                          const AdamScalars<float>& scalars,
                                          const typename Format::First& first,
                                          const typename Format::Second& second, uint32_t random16,
                                          float& exp_avg, float& exp_avg_sq) {
  StoredElement<kStorage> stored;
  stored.gradient = range.gradient[i];
  stored.parameter = range.parameter[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) stored.extra = range.extra[i];
  AdamElement<float> e;
  e.gradient = load(stored.gradient);
  e.parameter = load_parameter(stored);
  e.exp_avg = first.decode(range.exp_avg[i]);
  e.exp_avg_sq = second.decode(range.exp_avg_sq[i]);
  Rule::step(e, scalars);
  store_parameter(e.parameter, random16, stored);
  range.parameter[i] = stored.parameter;
  if constexpr (StorageOf<kStorage>::kHasExtra) range.extra[i] = stored.extra;
  exp_avg = e.exp_avg;
  exp_avg_sq = e.exp_avg_sq;
}

// random16: 16 bits for each element, read for stochastic rounding only.
template <class Rule, class Format, AdamStorage kStorage>
PACER_TARGET_CLONES static void step_coded_groups(const CodedGroups<Format, kStorage>& r,
                                                  const AdamScalars<float>& s, int64_t groups,
                                                  const uint16_t* random16) {
  constexpr int kGroup = Format::kGroup;
  const CodedGroups<Format, kStorage> range = r;
  const AdamScalars<float> scalars = s;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * kGroup;
    float exp_avg[kGroup], exp_avg_sq[kGroup];
    uint32_t largest = 0, largest_sq = 0;
    const typename Format::First was(range.exp_avg_scale[g]);
    const typename Format::Second was_sq(range.exp_avg_sq_scale[g]);
    PACER_SIMD
    for (int i = 0; i < kGroup; ++i) {
      uint32_t random = 0;
      if constexpr (kStorage == AdamStorage::bf16_stochastic) random = random16[begin + i];
      step_coded_element<Rule, Format, kStorage>(range, begin + i, scalars, was, was_sq, random, exp_avg[i],
                                                 exp_avg_sq[i]);
    }
    for (int i = 0; i < kGroup; ++i) {
      largest = std::max(largest, Format::First::measure(exp_avg[i]));
      largest_sq = std::max(largest_sq, Format::Second::measure(exp_avg_sq[i]));
    }
    range.exp_avg_scale[g] = Format::First::scale_of(largest);
    range.exp_avg_sq_scale[g] = Format::Second::scale_of(largest_sq);
    const typename Format::First now(range.exp_avg_scale[g]);
    const typename Format::Second now_sq(range.exp_avg_sq_scale[g]);
    PACER_SIMD
    for (int i = 0; i < kGroup; ++i) {
      range.exp_avg[begin + i] = now.encode(exp_avg[i]);
      range.exp_avg_sq[begin + i] = now_sq.encode(exp_avg_sq[i]);
    }
  }
}

// The group that a tensor ends in, which has fewer elements: the others are zeros.
template <class Rule, class Format, AdamStorage kStorage>
void step_coded_rest(const CodedGroups<Format, kStorage>& range, const AdamScalars<float>& scalars,
                     int64_t count, const uint16_t* random16) {
  using Types = StorageOf<kStorage>;
  constexpr int kGroup = Format::kGroup;
  typename Types::Param gradient[kGroup]{}, parameter[kGroup]{};
  typename Types::Extra extra[kGroup]{};
  typename Format::FirstCode exp_avg[kGroup]{};
  typename Format::SecondCode exp_avg_sq[kGroup]{};
  uint16_t random[kGroup]{};
  std::copy_n(range.gradient, count, gradient);
  std::copy_n(range.parameter, count, parameter);
  if constexpr (Types::kHasExtra) std::copy_n(range.extra, count, extra);
  std::copy_n(range.exp_avg, count, exp_avg);
  std::copy_n(range.exp_avg_sq, count, exp_avg_sq);
  if (random16 != nullptr) std::copy_n(random16, count, random);
  const CodedGroups<Format, kStorage> whole{
      gradient, parameter, extra, exp_avg, exp_avg_sq, range.exp_avg_scale, range.exp_avg_sq_scale};
  step_coded_groups<Rule, Format, kStorage>(whole, scalars, 1, random);
  std::copy_n(parameter, count, range.parameter);
  if constexpr (Types::kHasExtra) std::copy_n(extra, count, range.extra);
  std::copy_n(exp_avg, count, range.exp_avg);
  std::copy_n(exp_avg_sq, count, range.exp_avg_sq);
}

// Elements [begin, begin + count) of the tensor; begin is a multiple of the group.
template <class Rule, class Format, AdamStorage kStorage>
void step_coded_piece(const AdamTensor& tensor, const void* gradient, const AdamScalars<float>& scalars,
                      int64_t begin, int64_t count, const uint16_t* random16) {
  using Groups = CodedGroups<Format, kStorage>;
  const int64_t groups = count / Format::kGroup, rest = count % Format::kGroup;
  step_coded_groups<Rule, Format, kStorage>(Groups::of(tensor, gradient, begin), scalars, groups, random16);
  if (rest == 0) return;
  const int64_t whole = groups * Format::kGroup;
  step_coded_rest<Rule, Format, kStorage>(Groups::of(tensor, gradient, begin + whole), scalars, rest,
                                          random16 == nullptr ? nullptr : random16 + whole);
}

// Calls piece(begin, count, random16) for pieces of the tile that begin at multiples of the group, each with the bits of
// its elements; for all of it at once, with null, where the dtype set draws none.
template <class Format, AdamStorage kStorage, class Scalars, class Piece>
void for_each_coded_piece(const Tile& tile, const AdamTensor& tensor, const Scalars& scalars,
                          const Piece& piece) {
  if constexpr (kStorage != AdamStorage::bf16_stochastic) {
    piece(tile.offset, int64_t{tile.count}, nullptr);
  } else {
    constexpr int64_t kBlock = kDrawsAtOnce * kElementsPerDraw;
    constexpr int64_t kGroups = (kBlock - kElementsPerDraw) / Format::kGroup * Format::kGroup;
    uint16_t random16[kBlock];
    for (int64_t done = 0; done < tile.count; done += kGroups) {
      const int64_t begin = tile.offset + done, real_index = tensor.first_element + begin;
      fill_random16(scalars.seed, scalars.step, real_index / kElementsPerDraw, random16);
      piece(begin, std::min(kGroups, tile.count - done), random16 + real_index % kElementsPerDraw);
    }
  }
}

template <class Rule, class Format, AdamStorage kStorage>
void step_coded_tile(const Tile& tile, const AdamTensor& tensor, const void* gradient,
                     const AdamScalars<float>& scalars) {
  for_each_coded_piece<Format, kStorage>(
      tile, tensor, scalars, [&](int64_t begin, int64_t count, const uint16_t* random16) {
        step_coded_piece<Rule, Format, kStorage>(tensor, gradient, scalars, begin, count, random16);
      });
}

}  // namespace pacer::kernels
