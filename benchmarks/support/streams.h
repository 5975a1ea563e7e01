// How fast loops without any arithmetic to speak of go through buffers far larger than the caches. A kernel
// is held against the loop that reads and writes as many streams as it does, each where it lies.
#pragma once

#include <cstdint>
#include <memory>

namespace bench {

// What a loop does for each element of 4 bytes.
enum class Mix {
  copy,          // reads 1 and writes it elsewhere, by memcpy
  read,          // reads 1
  update,        // reads 1 and writes it back
  update_from1,  // reads 2, writes 1 of them back
  update_from2,  // reads 3, writes 1 of them back
};
const char* name_of(Mix mix);

class Streams {
 public:
  // Over buffers of so many elements.
  explicit Streams(int64_t count);

  // Goes through the buffers once, in `threads` even parts.
  void run(Mix mix, int threads);
  // Bytes read plus bytes written by run().
  double bytes(Mix mix) const;

 private:
  int64_t count_;
  std::unique_ptr<float[]> to_, first_, second_;
  float sum_ = 0;  // keeps what was only read from being left out
};

}  // namespace bench
