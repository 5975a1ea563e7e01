#include "streams.h"

#include <cstring>
#include <mutex>

#include <pacer/kernels/cpu/target.h>

#include "threads.h"

namespace bench {
namespace {

PACER_TARGET_CLONES float sum_of(const float* values, int64_t count) {
  constexpr int64_t kSums = 128;  // enough additions at a time that none waits for another
  float sums[kSums] = {};
  for (int64_t i = 0; i + kSums <= count; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) sums[j] += values[i + j];
  }
  float sum = 0;
  for (const float part : sums) sum += part;
  return sum;
}

PACER_TARGET_CLONES void add_one(float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += 1.0f;
}
PACER_TARGET_CLONES void add_first(float* to, const float* first, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += first[i];
}
PACER_TARGET_CLONES void add_both(float* to, const float* first, const float* second, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += first[i] + second[i];
}

}  // namespace

const char* name_of(Mix mix) {
  switch (mix) {
    case Mix::copy:
      return "memcpy";
    case Mix::read:
      return "read";
    case Mix::update:
      return "add in place";
    case Mix::update_from1:
      return "add another";
    case Mix::update_from2:
      break;
  }
  return "add two others";
}

Streams::Streams(int64_t count)
    : count_(count), to_(new float[count]), first_(new float[count]), second_(new float[count]) {
  for (float* values : {to_.get(), first_.get(), second_.get()}) {
    for (int64_t i = 0; i < count; ++i) values[i] = 1.0f + static_cast<float>(i % 1021);
  }
}

void Streams::run(Mix mix, int threads) {
  std::mutex mutex;
  run_parts(threads, count_, [&](int64_t begin, int64_t end) {
    float* to = to_.get() + begin;
    const float *first = first_.get() + begin, *second = second_.get() + begin;
    const int64_t count = end - begin;
    switch (mix) {
      case Mix::copy:
        std::memcpy(to, first, static_cast<size_t>(count) * sizeof(float));
        return;
      case Mix::read: {
        const float sum = sum_of(first, count);
        const std::lock_guard<std::mutex> lock(mutex);
        sum_ += sum;
        return;
      }
      case Mix::update:
        return add_one(to, count);
      case Mix::update_from1:
        return add_first(to, first, count);
      case Mix::update_from2:
        return add_both(to, first, second, count);
    }
  });
}

double Streams::bytes(Mix mix) const {
  const int streams = mix == Mix::read ? 1 : mix == Mix::update_from1 ? 3 : mix == Mix::update_from2 ? 4 : 2;
  return static_cast<double>(streams) * sizeof(float) * static_cast<double>(count_);
}

}  // namespace bench
