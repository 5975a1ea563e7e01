// A tensor whose moments are in 8 bits, beside the arrays of adam_arrays.h that hold its gradient, parameter and master
// copy: codes and scales, filled from random moments, and the step of one element that the loops must agree with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <pacer/kernels/adam_8bit.h>

#include "support/kernels/adam_arrays.h"

namespace pacer::kernels::testing {

struct CodedArrays {
  AdamArrays arrays;  // its moments are not used
  std::vector<int8_t> exp_avg;
  std::vector<uint8_t> exp_avg_sq;
  std::vector<uint16_t> exp_avg_scale, exp_avg_sq_scale;

  CodedArrays(AdamStorage storage, int64_t count, int shift = 0)
      : arrays(storage, count, shift),
        exp_avg(static_cast<size_t>(count)),
        exp_avg_sq(static_cast<size_t>(count)),
        exp_avg_scale(static_cast<size_t>((count + kMomentGroup - 1) / kMomentGroup)),
        exp_avg_sq_scale(exp_avg_scale.size()) {}

  int64_t count() const { return arrays.count(); }

  void fill(Samples& samples, Fill kind) {
    arrays.fill(samples, kind);
    std::vector<float> m, v;
    for (int64_t i = 0; i < count(); ++i) {
      m.push_back(static_cast<float>(random_number(samples, ElementType::f32, kind)));
      v.push_back(std::abs(static_cast<float>(random_number(samples, ElementType::f32, kind))));
    }
    set_moments(m, v);
  }
  void set_moments(const std::vector<float>& m, const std::vector<float>& v) {
    encode_moments_cpu(Moment::first, m.data(), count(), exp_avg.data(), exp_avg_scale.data());
    encode_moments_cpu(Moment::second, v.data(), count(), exp_avg_sq.data(), exp_avg_sq_scale.data());
  }
  std::vector<float> moments(Moment moment) const {
    std::vector<float> values(static_cast<size_t>(count()));
    if (moment == Moment::first) {
      decode_moments_cpu(moment, exp_avg.data(), exp_avg_scale.data(), count(), values.data());
    } else {
      decode_moments_cpu(moment, exp_avg_sq.data(), exp_avg_sq_scale.data(), count(), values.data());
    }
    return values;
  }

  AdamTensor tensor(int64_t first_element = 0) {
    AdamTensor t = arrays.tensor(first_element);
    t.exp_avg = exp_avg.data();
    t.exp_avg_sq = exp_avg_sq.data();
    t.max_exp_avg_sq = nullptr;
    t.exp_avg_scale = exp_avg_scale.data();
    t.exp_avg_sq_scale = exp_avg_sq_scale.data();
    return t;
  }

  void copy_from(const CodedArrays& other) {
    arrays.copy_from(other.arrays);
    exp_avg = other.exp_avg, exp_avg_sq = other.exp_avg_sq;
    exp_avg_scale = other.exp_avg_scale, exp_avg_sq_scale = other.exp_avg_sq_scale;
  }
};

// Of all that a step writes, NaN parameters being equal to each other.
inline int64_t differing_elements(const CodedArrays& a, const CodedArrays& b) {
  int64_t differing = differing_elements(a.arrays, b.arrays);
  const auto count = [&](const auto& left, const auto& right) {
    for (size_t i = 0; i < left.size(); ++i) differing += left[i] != right[i];
  };
  count(a.exp_avg, b.exp_avg);
  count(a.exp_avg_sq, b.exp_avg_sq);
  count(a.exp_avg_scale, b.exp_avg_scale);
  count(a.exp_avg_sq_scale, b.exp_avg_sq_scale);
  return differing;
}

// One step of one tensor on the CPU, cut into tiles of this size.
inline void step_on_cpu(CodedArrays& coded, const RuleSettings& settings, int64_t step,
                        int64_t tile_elements = int64_t{1} << 30, int64_t first_element = 0) {
  AdamGroupScalars scalars;
  scalars.set(0, coded.arrays.storage(), settings, step);
  const AdamTensor tensor = coded.tensor(first_element);
  const AdamGradient gradient{coded.arrays.data(kGradient), 0};
  for (const Tile& tile : make_tiles({coded.count()}, tile_elements)) {
    kAdam8BitUpdate.cpu({coded.arrays.storage(), false}, tile, &tensor, &gradient, scalars.data());
  }
}

// The same element by element: decoded moments, the rule on fp32 moments, and codes of what comes out.
template <AdamStorage kStorage>
void step_by_elements(CodedArrays& coded, const RuleSettings& settings, int64_t step, int64_t first_element) {
  AdamArrays& arrays = coded.arrays;
  std::vector<float> m = coded.moments(Moment::first), v = coded.moments(Moment::second);
  const auto scalars = adam_scalars<float>(settings, step);
  for (int64_t i = 0; i < coded.count(); ++i) {
    StoredElement<kStorage> stored{};
    std::memcpy(&stored.gradient, arrays.at(kGradient, i), sizeof stored.gradient);
    std::memcpy(&stored.parameter, arrays.at(kParameter, i), sizeof stored.parameter);
    if constexpr (StorageOf<kStorage>::kHasExtra)
      std::memcpy(&stored.extra, arrays.at(kExtra, i), sizeof stored.extra);
    const auto at = static_cast<size_t>(i);
    AdamElement<float> e{load(stored.gradient), load_parameter(stored), m[at], v[at], 0};
    adam_step<float, false>(e, scalars, settings.decay_mode, AnyOperands());
    const int64_t real = first_element + i;
    const PhiloxCounter draw = rounding_draw(settings.seed, step, real / 8);
    store_parameter(e.parameter, draw.word[real % 8 / 2] >> real % 2 * 16 & 0xFFFF, stored);
    std::memcpy(arrays.at(kParameter, i), &stored.parameter, sizeof stored.parameter);
    if constexpr (StorageOf<kStorage>::kHasExtra)
      std::memcpy(arrays.at(kExtra, i), &stored.extra, sizeof stored.extra);
    m[at] = e.exp_avg, v[at] = e.exp_avg_sq;
  }
  coded.set_moments(m, v);
}

// Calls run(storage) for every dtype set with codes, the storage as a constant.
template <class Run>
void for_every_coded(const Run& run) {
  for (const AdamStorage storage : kAllStorages) {
    with_storage(storage, [&](auto chosen) {
      if constexpr (chosen() != AdamStorage::f64) run(chosen);
    });
  }
}

}  // namespace pacer::kernels::testing
