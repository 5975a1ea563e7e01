// How fast loops without any arithmetic to speak of go through buffers far larger than the caches. A kernel
// is held against the loop that reads and writes as many streams as it does, each where it lies.
#pragma once

#include <cstdint>
#include <memory>

namespace bench::cpu {

// What a loop does for each element of 4 bytes.
enum class Mix {
  read,          // reads 1
  update,        // reads 1 and writes it back
  update_from1,  // reads 2, writes 1 of them back
  update_from2,  // reads 3, writes 1 of them back
};
constexpr Mix kMixes[] = {Mix::read, Mix::update, Mix::update_from1, Mix::update_from2};

const char* name_of(Mix mix);

class Streams {
 public:
  Streams();

  // Goes through the buffers once, in `threads` even parts.
  void run(Mix mix, int threads);
  // Bytes read plus bytes written by run().
  static double bytes(Mix mix);

 private:
  static constexpr int64_t kCount = int64_t{64} << 20;  // elements of a buffer
  std::unique_ptr<float[]> to_, first_, second_;
  float sum_ = 0;  // keeps what was only read from being left out
};

}  // namespace bench::cpu
