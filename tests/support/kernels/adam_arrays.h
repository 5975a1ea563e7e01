// The memory of one tensor of any Adam dtype set, for tests that run over all
// of them: six arrays between guard bytes, filled with random numbers of the
// right type and compared byte by byte. Knows the layout, not the arithmetic.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/samples.h"

namespace pacer::kernels::testing {

using pacer::testing::Samples;

constexpr std::array<AdamStorage, kAdamStorages> kAllStorages{AdamStorage::f64,
                                                              AdamStorage::f32,
                                                              AdamStorage::bf16_master,
                                                              AdamStorage::f16_master,
                                                              AdamStorage::bf16_remainder,
                                                              AdamStorage::bf16_correction,
                                                              AdamStorage::bf16,
                                                              AdamStorage::bf16_stochastic};
constexpr std::array<WeightDecay, 3> kAllDecays{WeightDecay::none, WeightDecay::l2, WeightDecay::decoupled};

inline const char* name_of(AdamStorage storage) {
  constexpr const char* kNames[kAdamStorages] = {"f64",
                                                 "f32",
                                                 "bf16_master",
                                                 "f16_master",
                                                 "bf16_remainder",
                                                 "bf16_correction",
                                                 "bf16",
                                                 "bf16_stochastic"};
  return kNames[static_cast<int>(storage)];
}
inline const char* name_of(WeightDecay decay) {
  constexpr const char* kNames[] = {"no decay", "l2", "decoupled"};
  return kNames[static_cast<int>(decay)];
}

inline std::string name_of(AdamStorage storage, WeightDecay decay, bool amsgrad) {
  return std::string(name_of(storage)) + ", " + name_of(decay) + (amsgrad ? ", amsgrad" : "");
}

enum class ElementType { f64, f32, bf16, f16, bits16, bits8, none };
enum AdamArray : int { kGradient, kParameter, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kExtra, kAdamArrays };

inline size_t bytes_of(ElementType type) {
  constexpr size_t kBytes[] = {8, 4, 2, 2, 2, 1, 0};
  return kBytes[static_cast<int>(type)];
}

inline ElementType type_of(AdamStorage storage, int array) {
  using T = ElementType;
  // parameter and gradient, moments, extra
  constexpr T kTypes[kAdamStorages][3] = {{T::f64, T::f64, T::none},    {T::f32, T::f32, T::none},
                                          {T::bf16, T::f32, T::f32},    {T::f16, T::f32, T::f32},
                                          {T::bf16, T::f32, T::bits16}, {T::bf16, T::f32, T::bits8},
                                          {T::bf16, T::bf16, T::none},  {T::bf16, T::f32, T::none}};
  constexpr int kColumn[kAdamArrays] = {0, 0, 1, 1, 1, 2};
  return kTypes[static_cast<int>(storage)][kColumn[array]];
}

inline void write_number(ElementType type, void* memory, double number) {
  const float single = static_cast<float>(number);
  const BFloat16 brain = to_bfloat16(single);
  const Float16 half = to_float16(single);
  switch (type) {
    case ElementType::f64:
      std::memcpy(memory, &number, 8);
      break;
    case ElementType::f32:
      std::memcpy(memory, &single, 4);
      break;
    case ElementType::bf16:
      std::memcpy(memory, &brain, 2);
      break;
    case ElementType::f16:
      std::memcpy(memory, &half, 2);
      break;
    case ElementType::bits16:
    case ElementType::bits8:
    case ElementType::none:
      break;
  }
}

inline double read_number(ElementType type, const void* memory) {
  double number = 0;
  float single;
  uint16_t bits;
  switch (type) {
    case ElementType::f64:
      std::memcpy(&number, memory, 8);
      return number;
    case ElementType::f32:
      std::memcpy(&single, memory, 4);
      return single;
    case ElementType::bf16:
      std::memcpy(&bits, memory, 2);
      return to_float(BFloat16{bits});
    case ElementType::f16:
      std::memcpy(&bits, memory, 2);
      return to_float(Float16{bits});
    case ElementType::bits16:
      std::memcpy(&bits, memory, 2);
      return bits;
    case ElementType::bits8:
      return *static_cast<const int8_t*>(memory);
    case ElementType::none:
      break;
  }
  return number;
}

// What numbers an array is filled with. `mixed` adds zeros,
// denormals and large numbers; `wild` also NaNs, infinities.
enum class Fill { plain, mixed, wild };

inline double random_number(Samples& samples, ElementType type, Fill fill) {
  if (fill != Fill::plain && samples.chance(0.15)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const double tiny = type == ElementType::f64 ? 1e-310 : type == ElementType::f16 ? 1e-6 : 1e-40;
    const double large = type == ElementType::f16 ? 6e4 : 1e15;
    if (fill == Fill::wild && samples.chance(0.2)) {
      return samples.one_of({kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()});
    }
    return samples.one_of({0.0, -0.0, tiny, -tiny, large, -large, 3 * tiny, 0.5});
  }
  return samples.sign() * samples.log_uniform(1e-6, 10);
}

// `count` elements in each array. Each begins `shift`
// elements behind a 64-byte boundary, between guard bytes.
class AdamArrays {
 public:
  AdamArrays(AdamStorage storage, int64_t count, int shift = 0)
      : storage_(storage), count_(count), shift_(shift) {
    for (int array = 0; array < kAdamArrays; ++array) {
      const size_t shifted = static_cast<size_t>(shift) * element(array);
      bytes_[array].assign(2 * kGuardBytes + 64 + shifted + size(array), kGuardByte);
    }
  }
  AdamArrays(AdamArrays&&) = default;
  AdamArrays(const AdamArrays&) = delete;  // a copy's memory would have another alignment; see copy_from

  void fill(Samples& samples, Fill kind) {
    for (int64_t i = 0; i < count_; ++i) {
      for (int array = kGradient; array <= kMaxExpAvgSq; ++array) {
        const ElementType type = type_of(storage_, array);
        double number = random_number(samples, type, kind);
        if (array >= kExpAvgSq) number = std::abs(number);
        set(array, i, number);
      }
      const double master = random_number(samples, ElementType::f32, kind);
      set_master(i, static_cast<float>(master));
    }
  }

  // Parameter and extra as the fp32 value `master` is kept
  // in this dtype set; nothing where there is no extra.
  void set_master(int64_t i, float master) {
    if (storage_ == AdamStorage::bf16_remainder) {
      const BFloat16AndRemainder both = split(master);
      std::memcpy(at(kParameter, i), &both.rounded, 2);
      std::memcpy(at(kExtra, i), &both.remainder, 2);
    } else if (storage_ == AdamStorage::bf16_correction) {
      const BFloat16AndCorrection both = split_24(master);
      std::memcpy(at(kParameter, i), &both.rounded, 2);
      std::memcpy(at(kExtra, i), &both.correction, 1);
    } else if (type_of(storage_, kExtra) == ElementType::f32) {
      set(kExtra, i, master);
      set(kParameter, i, master);
    }
  }

  AdamTensor tensor(int64_t first_element = 0) {
    AdamTensor t{data(kParameter),   data(kExpAvg), data(kExpAvgSq),
                 data(kMaxExpAvgSq), nullptr,       first_element};
    if (type_of(storage_, kExtra) != ElementType::none) t.master_or_remainder = data(kExtra);
    return t;
  }

  AdamStorage storage() const { return storage_; }
  int64_t count() const { return count_; }
  unsigned char* data(int array) { return aligned(array) + static_cast<size_t>(shift_) * element(array); }
  const unsigned char* data(int array) const { return const_cast<AdamArrays*>(this)->data(array); }
  void* at(int array, int64_t i) { return data(array) + static_cast<size_t>(i) * element(array); }
  double get(int array, int64_t i) const {
    return read_number(type_of(storage_, array), data(array) + static_cast<size_t>(i) * element(array));
  }
  void set(int array, int64_t i, double number) {
    write_number(type_of(storage_, array), at(array, i), number);
  }
  size_t element(int array) const { return bytes_of(type_of(storage_, array)); }
  size_t size(int array) const { return static_cast<size_t>(count_) * element(array); }

  // Copies the elements of another one with the same dtype set and count.
  void copy_from(const AdamArrays& other) {
    for (int array = 0; array < kAdamArrays; ++array)
      std::memcpy(data(array), other.data(array), size(array));
  }

  bool same_bytes(const AdamArrays& other) const {
    for (int array = 0; array < kAdamArrays; ++array) {
      if (std::memcmp(data(array), other.data(array), size(array)) != 0) return false;
    }
    return true;
  }

  bool guards_are_intact() const {
    for (int array = 0; array < kAdamArrays; ++array) {
      const std::vector<unsigned char>& bytes = bytes_[array];
      const auto first = static_cast<size_t>(data(array) - bytes.data());
      for (size_t i = 0; i < bytes.size(); ++i) {
        const bool inside = i >= first && i < first + size(array);
        if (!inside && bytes[i] != kGuardByte) return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuardBytes = 128;
  static constexpr unsigned char kGuardByte = 0xA5;

  unsigned char* aligned(int array) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_[array].data()) + kGuardBytes;
    return bytes_[array].data() + kGuardBytes + (64 - address % 64) % 64;
  }

  AdamStorage storage_;
  int64_t count_;
  int shift_;
  std::array<std::vector<unsigned char>, kAdamArrays> bytes_;
};

// Calls run(storage, decay, amsgrad) for every combination.
template <class Run>
void for_every_mode(const Run& run) {
  for (const AdamStorage storage : kAllStorages) {
    for (const WeightDecay decay : kAllDecays) {
      for (const bool amsgrad : {false, true}) run(storage, decay, amsgrad);
    }
  }
}

// Elements of all arrays that differ, NaNs being equal to each other (their bits depend on the machine).
inline int64_t differing_elements(const AdamArrays& a, const AdamArrays& b) {
  int64_t differing = 0;
  for (int array = 0; array < kAdamArrays; ++array) {
    const size_t width = a.element(array);
    for (int64_t i = 0; i < a.count(); ++i) {
      const size_t offset = static_cast<size_t>(i) * width;
      const bool same_bits = std::memcmp(a.data(array) + offset, b.data(array) + offset, width) == 0;
      if (same_bits) continue;
      const ElementType type = type_of(a.storage(), array);
      const bool both_nan = type != ElementType::bits16 && type != ElementType::bits8 &&
                            std::isnan(a.get(array, i)) && std::isnan(b.get(array, i));
      differing += !both_nan;
    }
  }
  return differing;
}

// Scalars of any number of step groups, as the kernels expect them.
class AdamGroupScalars {
 public:
  explicit AdamGroupScalars(int64_t count = 1) : groups_(static_cast<size_t>(count)) {}

  void set(int64_t group, AdamStorage storage, const RuleSettings& settings, int64_t step,
           bool skip = false) {
    StepScalars& scalars = groups_[static_cast<size_t>(group)];
    if (storage == AdamStorage::f64) {
      put(scalars, adam_scalars<double>(settings, step), skip);
    } else {
      put(scalars, adam_scalars<float>(settings, step), skip);
    }
  }
  const StepScalars* data() const { return groups_.data(); }
  const std::vector<StepScalars>& all() const { return groups_; }

 private:
  template <class Scalars>
  static void put(StepScalars& memory, Scalars scalars, bool skip) {
    scalars.skip = skip;
    memory.set(scalars);
  }
  std::vector<StepScalars> groups_;
};

inline RuleSettings settings_with(WeightDecay decay) {
  RuleSettings settings;
  settings.learning_rate = 0.02;
  settings.weight_decay = 0.1;
  settings.factor = 0.75;
  settings.seed = 0x123456789ABCDEF0u;
  settings.decay_mode = decay;
  return settings;
}

// One step of one tensor on the CPU, cut into tiles of this size.
inline void step_on_cpu(AdamArrays& arrays, bool amsgrad, const RuleSettings& settings, int64_t step,
                        int64_t tile_elements = int64_t{1} << 30, int64_t first_element = 0) {
  AdamGroupScalars scalars;
  scalars.set(0, arrays.storage(), settings, step);
  const AdamTensor tensor = arrays.tensor(first_element);
  const AdamGradient gradient{arrays.data(kGradient), 0};
  for (const Tile& tile : make_tiles({arrays.count()}, tile_elements)) {
    adam_cpu({arrays.storage(), amsgrad}, tile, &tensor, &gradient, scalars.data());
  }
}

}  // namespace pacer::kernels::testing
