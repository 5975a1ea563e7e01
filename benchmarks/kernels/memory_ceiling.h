// How fast the memory of the host can be read and written, on buffers far larger than any cache: by memcpy,
// which is the usual measure, and by a loop that adds to every element of a buffer in place. An optimizer
// writes where it has read, like that loop; memcpy writes elsewhere, which costs some processors half of
// their bandwidth.
#pragma once

#include <cstdint>
#include <memory>

namespace bench::kernels {

class MemoryCeiling {
 public:
  MemoryCeiling();

  // Each touches its buffers once, in `threads` even parts.
  void copy(int threads);
  void update(int threads);

  // Bytes read plus bytes written by either.
  double traffic() const { return 2.0 * static_cast<double>(kCount * sizeof(float)); }

 private:
  static constexpr int64_t kCount = int64_t{128} << 20;
  std::unique_ptr<float[]> from_;
  std::unique_ptr<float[]> to_;
};

// Free memory of the host in bytes, or -1 where it is not known.
int64_t available_host_memory();

}  // namespace bench::kernels
