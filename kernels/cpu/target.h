// What every CPU loop shares: machine code for several x86-64 levels chosen at load time, and a guard that
// computes denormals in full. The loops stay single-threaded; callers spread tiles over threads.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Clones of a function for AVX2 + FMA and for AVX-512. Every clone computes the same bits. ThreadSanitizer's
// start-up cannot run the resolvers, so there the clones are left out.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define PACER_TARGET_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PACER_TARGET_CLONES
#endif

namespace pacer::kernels {

// Switches flush-to-zero and denormals-are-zero off on this thread and restores the caller's mode at scope
// exit.
class FullDenormals {
 public:
#if defined(__SSE2__)
  FullDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushToZeroAndDenormalsAreZero); }
  ~FullDenormals() { _mm_setcsr(saved_); }
#else
  FullDenormals() = default;
#endif
  FullDenormals(const FullDenormals&) = delete;
  FullDenormals& operator=(const FullDenormals&) = delete;

#if defined(__SSE2__)
 private:
  static constexpr unsigned kFlushToZeroAndDenormalsAreZero = 0x8040;
  unsigned saved_;
#endif
};

}  // namespace pacer::kernels
