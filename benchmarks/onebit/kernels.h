// The kernels and collectives of a compressed step, each on its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

namespace bench::onebit {

struct Part {
  std::string what;
  double bytes;  // of device memory, moved at least; 0 where that is not what counts
  std::function<void()> run;
};

class Kernels {
 public:
  // Tensors of so many fp32 elements; chunks as for the Communicator's ranks; signs with a scale for each
  // block, or with one.
  Kernels(const std::vector<int64_t>& counts, bool block_scales, pacer::Communicator& world);
  ~Kernels();

  // A device-to-device copy, and the bytes that it reads and writes.
  void copy() const;
  double copied_bytes() const;
  // What a step of 1-bit Adam starts, then what else one of 1-bit LAMB does.
  std::vector<Part> parts() const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace bench::onebit
