// NF4 restated plainly: thresholds as numbers, searched one by one, and memory for the kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <pacer/kernels/nf4.h>

namespace pacer::testing {

// The bits of those that bitsandbytes' GPU code has.
inline const std::array<float, 15> kNf4ReferenceThresholds = [] {
  constexpr int32_t kBits[15] = {-1084678951, -1088662928, -1091861376, -1095898506, -1099940628,
                                 -1106429764, -1120241551, 1025702655,  1039550563,  1045456864,
                                 1049985748,  1053250553,  1056992515,  1059360175,  1063029209};
  std::array<float, 15> thresholds{};
  std::memcpy(thresholds.data(), kBits, sizeof kBits);
  return thresholds;
}();

// Numbers in 4 bits and the memory that they lie in.
struct Nf4Arrays {
  Nf4Arrays(int64_t n, bool is_nested)
      : count(n),
        nested(is_nested),
        codes(size(kernels::nf4_bytes(n)), 0xAA),
        scales(size(kernels::nf4_blocks(n)), -1.0f),
        scale_codes(size(kernels::nf4_blocks(n)), 0xAA),
        nested_scales(size(kernels::nf4_nested_blocks(n)), -1.0f) {}

  kernels::Nf4Codes view() {
    kernels::Nf4Codes view;
    view.codes = codes.data();
    view.count = count;
    if (nested) {
      view.absmax_codes = scale_codes.data();
      view.nested_absmax = nested_scales.data();
      view.nested_map = kernels::nf4_nested_map().data();
      view.offset = &offset;
    } else {
      view.absmax = scales.data();
    }
    return view;
  }
  // Without double quantisation the scales, with it what is stored in their place.
  bool operator==(const Nf4Arrays& other) const {
    return codes == other.codes &&
           (nested ? scale_codes == other.scale_codes && nested_scales == other.nested_scales &&
                         offset == other.offset
                   : scales == other.scales);
  }

  static size_t size(int64_t n) { return static_cast<size_t>(n); }
  int64_t count;
  bool nested;
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // with double quantisation scratch
  std::vector<uint8_t> scale_codes;
  std::vector<float> nested_scales;
  float offset = -1;
};

inline uint8_t nf4_nearest(const float* borders, int count, float value) {
  return static_cast<uint8_t>(std::lower_bound(borders, borders + count, value) - borders);
}

// Of finite values, of which none but zeros are smaller than 2^-100.
inline Nf4Arrays nf4_reference(const std::vector<float>& x, bool is_nested) {
  const auto count = static_cast<int64_t>(x.size());
  Nf4Arrays to(count, is_nested);
  std::fill(to.codes.begin(), to.codes.end(), uint8_t{0x77});
  for (size_t block = 0; block < to.scales.size(); ++block) {
    float largest = 0;
    const size_t begin = block * 64, end = std::min(x.size(), begin + 64);
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    to.scales[block] = largest;
    for (size_t i = begin; i < end && largest > 0; ++i) {
      const uint8_t code = nf4_nearest(kNf4ReferenceThresholds.data(), 15, x[i] * (1.0f / largest));
      uint8_t& both = to.codes[i / 2];
      both = static_cast<uint8_t>(i % 2 == 0 ? code << 4 | (both & 15) : (both & 0xF0) | code);
    }
  }
  if (!is_nested) return to;
  const auto& map = kernels::nf4_nested_map();
  float borders[255];
  for (size_t i = 0; i < 255; ++i) borders[i] = (map[i] + map[i + 1]) / 2;
  std::vector<double> columns(256);
  for (size_t part = 0; part < to.nested_scales.size(); ++part) {
    std::vector<double> sums(256);
    for (size_t i = 0; i < 256 && part * 256 + i < to.scales.size(); ++i) {
      sums[i] = static_cast<double>(to.scales[part * 256 + i]);
    }
    for (size_t h = 128; h > 0; h /= 2) {
      for (size_t i = 0; i < h; ++i) sums[i] += sums[i + h];
    }
    columns[part % 256] += static_cast<double>(static_cast<float>(sums[0] / 256));
  }
  for (size_t h = 128; h > 0; h /= 2) {
    for (size_t i = 0; i < h; ++i) columns[i] += columns[i + h];
  }
  to.offset = x.empty() ? 0.0f : static_cast<float>(columns[0] * 256 / static_cast<double>(to.scales.size()));
  for (size_t part = 0; part < to.nested_scales.size(); ++part) {
    const size_t begin = part * 256, end = std::min(to.scales.size(), begin + 256);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(to.scales[i] - to.offset));
    to.nested_scales[part] = largest;
    for (size_t i = begin; i < end; ++i) {
      const float distance = to.scales[i] - to.offset;
      to.scale_codes[i] =
          largest == 0 ? uint8_t{127} : nf4_nearest(borders, 255, distance * (1.0f / largest));
    }
  }
  return to;
}

// The values before they are rounded to a dtype.
inline std::vector<float> nf4_values(const Nf4Arrays& from) {
  std::vector<float> values(static_cast<size_t>(from.count));
  for (size_t i = 0; i < values.size(); ++i) {
    float scale = from.scales[i / 64];
    if (from.nested) {
      const volatile float product =  // rounded, whatever the compiler would make of it
          kernels::nf4_nested_map()[from.scale_codes[i / 64]] * from.nested_scales[i / 64 / 256];
      scale = product + from.offset;
    }
    const uint8_t both = from.codes[i / 2];
    values[i] = kernels::kNf4Book[i % 2 == 0 ? both >> 4 : both & 15] * scale;
  }
  return values;
}

// Normal numbers, with a block of zeros where there are three blocks at least.
inline std::vector<float> nf4_numbers(int64_t count, float scale = 0.02f) {
  std::mt19937 generator(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = normal(generator);
  if (count >= 192) std::fill_n(x.begin() + 64, 64, 0.0f);
  return x;
}

constexpr int64_t kNf4Counts[] = {0,     1,     2,     7,     8,     63,     64,    65,    127,
                                  128,   129,   1000,  1023,  1024,  1025,   8192,  16383, 16384,
                                  16385, 16448, 20001, 65536, 70003, 100000, 300001};

}  // namespace pacer::testing
