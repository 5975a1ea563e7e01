// The compressed mean inside the textbooks of 1-bit optimizers (onebit_method_reference.h): all ranks are a
// loop, both errors are stored, signs are numbers and nothing is packed. Only what these optimizers ask for,
// and written from the definition in section 4 of Tang et al. (arXiv:2102.02888) alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pacer::testing {

struct TextbookExchange {
  using Numbers = std::vector<float>;

  size_t world_size = 1;
  bool l1 = false, block_scales = false;
  std::vector<char> is_real;           // by position in the flat buffer: not padding
  std::vector<Numbers> worker_errors;  // e, by rank
  Numbers server_error;                // E, of the whole buffer
  size_t chunk = 0;

  // Appends a tensor and its padding; returns where it begins.
  size_t add(size_t elements) {
    const size_t begin = is_real.size();
    is_real.insert(is_real.end(), elements, 1);
    is_real.resize((is_real.size() + 127) / 128 * 128, 0);
    return begin;
  }
  // After the last tensor.
  void start() {
    const size_t alignment = (block_scales ? 2048 : 128) * world_size;
    chunk = (is_real.size() + alignment - 1) / alignment * alignment / world_size;
    worker_errors.assign(world_size, Numbers(is_real.size(), 0));
    server_error.assign(is_real.size(), 0);
  }

  // The 1-bit all-reduce with error feedback.
  Numbers mean(const std::vector<Numbers>& inputs) {
    const auto share = static_cast<float>(1.0 / static_cast<double>(world_size));
    Numbers y(is_real.size(), 0);
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      Numbers& e = worker_errors[rank];
      Numbers c(is_real.size(), 0);
      for (size_t k = 0; k < c.size(); ++k) c[k] = is_real[k] ? inputs[rank][k] + e[k] : 0.0f;
      for_blocks(0, c.size(), [&](size_t begin, size_t end) {
        const float s = scale(c, begin, end), w = s * share;
        for (size_t k = begin; k < end; ++k) {
          if (!is_real[k]) continue;
          e[k] = c[k] - s * sign(c[k]);
          y[k] = rank == 0 ? w * sign(c[k]) : y[k] + w * sign(c[k]);
        }
      });
    }
    for (size_t first = 0; first < y.size(); first += chunk) {
      const size_t last = std::min(y.size(), first + chunk);
      for (size_t k = first; k < last; ++k) y[k] = is_real[k] ? y[k] + server_error[k] : 0.0f;
      for_blocks(first, last, [&](size_t begin, size_t end) {
        const float s = scale(y, begin, end);
        for (size_t k = begin; k < end; ++k) {
          if (!is_real[k]) continue;
          server_error[k] = y[k] - s * sign(y[k]);
          y[k] = s * sign(y[k]);
        }
      });
    }
    return y;
  }

  // In the one order of additions, of squares or magnitudes.
  static double sum(const Numbers& values, size_t begin, size_t end, bool magnitudes) {
    std::vector<double> partials(256, 0.0);
    for (size_t unit = begin, number = 0; unit < end; unit += 32768, ++number) {
      Numbers columns(2048, 0), fours(512);
      for (size_t i = unit; i < std::min(end, unit + 32768); ++i) {
        float& column = columns[(i - unit) % 2048];
        column = magnitudes ? column + std::fabs(values[i]) : std::fmaf(values[i], values[i], column);
      }
      for (size_t k = 0; k < 512; ++k) {
        fours[k] = (columns[4 * k] + columns[4 * k + 1]) + (columns[4 * k + 2] + columns[4 * k + 3]);
      }
      partials[number % 256] += static_cast<double>(by_halves(fours));
    }
    return by_halves(partials);
  }

 private:
  template <class Real>
  static Real by_halves(std::vector<Real> level) {
    while (level.size() > 1) {
      std::vector<Real> next;
      for (size_t i = 0; i < level.size() / 2; ++i) next.push_back(level[i] + level[i + level.size() / 2]);
      level = std::move(next);
    }
    return level.front();
  }
  static float sign(float value) { return value < 0 ? -1.0f : 1.0f; }

  // f(begin, end) for the elements of [begin, end) that share a scale.
  template <class F>
  void for_blocks(size_t begin, size_t end, const F& f) const {
    const size_t width = block_scales ? 2048 : std::max<size_t>(end - begin, 1);
    for (; begin < end; begin += width) f(begin, std::min(end, begin + width));
  }
  float scale(const Numbers& values, size_t begin, size_t end) const {
    const auto count = std::count(is_real.begin() + static_cast<int64_t>(begin),
                                  is_real.begin() + static_cast<int64_t>(end), 1);
    if (count == 0) return 0;
    const double average = sum(values, begin, end, l1) / static_cast<double>(count);
    return static_cast<float>(l1 ? average : std::sqrt(average));
  }
};

}  // namespace pacer::testing
