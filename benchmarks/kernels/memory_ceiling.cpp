#include "memory_ceiling.h"

#include <cstring>
#include <fstream>
#include <string>

#include "support/threads.h"

namespace bench::kernels {

MemoryCeiling::MemoryCeiling() : from_(new float[kCount]), to_(new float[kCount]) {
  // Every page is touched and holds something else than zeros.
  for (int64_t i = 0; i < kCount; ++i) from_[i] = 1.0f + static_cast<float>(i % 1021);
  copy(1);
}

void MemoryCeiling::copy(int threads) {
  run_parts(threads, kCount, [&](int64_t begin, int64_t end) {
    std::memcpy(to_.get() + begin, from_.get() + begin, static_cast<size_t>(end - begin) * sizeof(float));
  });
}

void MemoryCeiling::update(int threads) {
  run_parts(threads, kCount, [&](int64_t begin, int64_t end) {
    float* const values = to_.get();
    for (int64_t i = begin; i < end; ++i) values[i] += 1.0f;
  });
}

int64_t available_host_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::string unit;
  int64_t kibibytes = 0;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    std::getline(file, unit);
  }
  return -1;
}

}  // namespace bench::kernels
