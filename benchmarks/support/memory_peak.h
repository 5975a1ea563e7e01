// What fills a GPU's memory at the moment when most of it is taken, and how much there is of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace bench {

// Tensors of one size that were taken in one phase.
struct MemoryKind {
  std::string phase;
  int64_t bytes;  // of one of them, as the allocator rounds it
  int64_t count;
};

// Tensors of this process may take so many GB (1e9 bytes) of the GPU, as if it had no more.
void limit_memory(at::Device gpu, double gigabytes);

// From now on the allocator writes down what is taken and given back; without CUDA there is nothing to write down.
void start_memory_trace();
// Names what is taken from now on, by any thread. `phase` must live as long as the program.
void set_memory_phase(const char* phase);
// Ends the trace. What was there at its largest sum, the kinds with most bytes first.
std::vector<MemoryKind> memory_at_peak(at::Device gpu);

}  // namespace bench
