// Gradients of any type for tests of the norm: set and read
// as double, summed by the CPU kernel and by the restatement.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <pacer/kernels/norm.h>

#include "support/kernels/half_reference.h"
#include "support/kernels/reduction_reference.h"
#include "support/samples.h"

namespace pacer::kernels::testing {

constexpr GradientType kAllGradientTypes[] = {GradientType::f64, GradientType::f32, GradientType::bf16,
                                              GradientType::f16};

// `count` elements that begin `shift` elements into their memory.
class NormInput {
 public:
  NormInput(GradientType type, int64_t count, int shift = 0)
      : type_(type),
        count_(count),
        shift_(shift),
        memory_(static_cast<size_t>(count + shift) * width() + 64) {}

  void set(int64_t i, double number) {
    const float single = static_cast<float>(number);
    const BFloat16 brain = to_bfloat16(single);
    const Float16 half = to_float16(single);
    switch (type_) {
      case GradientType::f64:
        std::memcpy(at(i), &number, 8);
        break;
      case GradientType::f32:
        std::memcpy(at(i), &single, 4);
        break;
      case GradientType::bf16:
        std::memcpy(at(i), &brain, 2);
        break;
      case GradientType::f16:
        std::memcpy(at(i), &half, 2);
        break;
    }
  }

  double get(int64_t i) const {
    using namespace pacer::testing;
    double number = 0;
    float single;
    uint16_t bits;
    switch (type_) {
      case GradientType::f64:
        std::memcpy(&number, at(i), 8);
        break;
      case GradientType::f32:
        std::memcpy(&single, at(i), 4), number = single;
        break;
      case GradientType::bf16:
        std::memcpy(&bits, at(i), 2), number = decode_half(bits, kBFloat16Format);
        break;
      case GradientType::f16:
        std::memcpy(&bits, at(i), 2), number = decode_half(bits, kFloat16Format);
        break;
    }
    return number;
  }

  NormInput& fill(uint64_t seed) {
    pacer::testing::Samples samples(seed);
    for (int64_t i = 0; i < count_; ++i) set(i, samples.sign() * samples.log_uniform(1e-4, 10));
    return *this;
  }

  // By the kernel.
  double sum(int64_t count) const { return sum_of_squares_cpu(type_, at(0), count); }
  double sum() const { return sum(count_); }

  // By the restatement.
  double expected(int64_t count) const {
    using pacer::testing::sum_of_squares_of_unit;
    if (type_ == GradientType::f64)
      return sum_of_squares_of_unit<double>(count, [&](int64_t i) { return get(i); });
    return sum_of_squares_of_unit<float>(count, [&](int64_t i) { return static_cast<float>(get(i)); });
  }

  int64_t count() const { return count_; }
  int shift() const { return shift_; }
  size_t width() const { return type_ == GradientType::f64 ? 8 : type_ == GradientType::f32 ? 4 : 2; }
  const unsigned char* data() const { return at(0); }

 private:
  unsigned char* at(int64_t i) { return memory_.data() + static_cast<size_t>(i + shift_) * width(); }
  const unsigned char* at(int64_t i) const { return const_cast<NormInput*>(this)->at(i); }

  GradientType type_;
  int64_t count_;
  int shift_;
  std::vector<unsigned char> memory_;
};

}  // namespace pacer::kernels::testing
