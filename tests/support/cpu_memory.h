// Counts every byte that LibTorch allocates on the CPU while it exists. oneDNN, whose products of 16-bit
// matrices take scratch memory of their own on processors with AMX, is off meanwhile.
#pragma once

#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace pacer::testing {

class CountedCpuMemory {
 public:
  CountedCpuMemory() {
    c10::SetCPUAllocator(&counter(), kPriority);
    at::globalContext().setUserEnabledMkldnn(false);
  }
  CountedCpuMemory(const CountedCpuMemory&) = delete;
  ~CountedCpuMemory() {
    at::globalContext().setUserEnabledMkldnn(true);
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), kPriority);
  }

  // Bytes that are allocated now, of those allocated while this exists.
  static int64_t live() { return counter().live; }
  static int64_t peak() { return counter().peak; }
  static void reset_peak() { counter().peak = counter().live.load(); }

 private:
  static constexpr uint8_t kPriority = 200;

  struct Counter final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
      if (bytes == 0) return {nullptr, nullptr, &drop, at::kCPU};
      void* data = nullptr;
      if (posix_memalign(&data, 64, bytes) != 0) throw std::bad_alloc();
      const int64_t now = live += static_cast<int64_t>(malloc_usable_size(data));
      for (int64_t before = peak; now > before && !peak.compare_exchange_weak(before, now);) {
      }
      return {data, data, &drop, at::kCPU};
    }
    static void drop(void* data) {
      if (data == nullptr) return;
      counter().live -= static_cast<int64_t>(malloc_usable_size(data));
      std::free(data);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

    std::atomic<int64_t> live{0}, peak{0};
  };
  // Lives as long as anything that was allocated with it.
  static Counter& counter() {
    static auto* const only = new Counter;
    return *only;
  }
};

}  // namespace pacer::testing
