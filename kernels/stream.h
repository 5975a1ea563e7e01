// The CUDA stream type, declared so that headers need no CUDA toolkit: it is the same type as cudaStream_t.
// A function that enqueues work on a GPU takes the stream as its last argument; there is no default.
#pragma once

struct CUstream_st;

namespace pacer::kernels {

using Stream = CUstream_st*;

}  // namespace pacer::kernels
