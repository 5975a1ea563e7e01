// The CUDA stream type, declared so that headers need no CUDA toolkit: it is the same type as cudaStream_t;
// and what else the folders above ask of CUDA itself.
// A function that enqueues work on a GPU takes the stream as its last argument; there is no default.
#pragma once

#include <array>
#include <cstdint>

struct CUstream_st;

namespace pacer::kernels {

// A CUDA stream, the same type as cudaStream_t.
using Stream = CUstream_st*;

// True while what is enqueued on the stream becomes part of a CUDA graph. Throws DeviceError where CUDA
// fails.
bool is_capturing(Stream stream);

// Numbers that tell a GPU from all others, also those that other processes and hosts see.
std::array<int64_t, 2> gpu_id(int gpu);

// Ten times the major number and the minor one: 90 for Hopper.
int compute_capability(int gpu);

}  // namespace pacer::kernels
