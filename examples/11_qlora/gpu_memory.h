// A limit for what LibTorch may take of a GPU, as a smaller GPU would set it.
#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace qlora {

// Bytes that tensors take at present. Both functions throw pacer::Unavailable in a build without CUDA.
int64_t gpu_memory_in_use(at::Device gpu);
// From now on tensors take so many bytes at most, with what the cache keeps; more is LibTorch's out-of-memory
// error. Gives the cache back first.
void limit_gpu_memory(at::Device gpu, int64_t bytes);

}  // namespace qlora
