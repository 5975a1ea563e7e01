// Helpers every CUDA source shares: wide loads and stores, and the check after a launch.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_runtime.h>

#include <pacer/core/error.h>

namespace pacer::kernels {

// Alignment, in bytes, that load_packet and store_packet need for N elements of T.
template <class T, int N>
constexpr uintptr_t kPacketAlignment = sizeof(T) * N >= 16 ? 16 : sizeof(T) * N;

template <class T, int N>
__device__ __forceinline__ bool is_packet_aligned(const T* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & (kPacketAlignment<T, N> - 1)) == 0;
}

namespace detail {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};

}  // namespace detail

// N consecutive elements in accesses of 16 (or 8) bytes.
template <class T, int N>
__device__ __forceinline__ void load_packet(const T* memory, T (&values)[N]) {
  using Word = typename detail::WordOf<kPacketAlignment<T, N>>::type;
  constexpr int kWords = sizeof(T) * N / sizeof(Word);
  Word words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = reinterpret_cast<const Word*>(memory)[w];
  memcpy(values, words, sizeof(values));
}

template <class T, int N>
__device__ __forceinline__ void store_packet(T* memory, const T (&values)[N]) {
  using Word = typename detail::WordOf<kPacketAlignment<T, N>>::type;
  constexpr int kWords = sizeof(T) * N / sizeof(Word);
  Word words[kWords];
  memcpy(words, values, sizeof(values));
#pragma unroll
  for (int w = 0; w < kWords; ++w) reinterpret_cast<Word*>(memory)[w] = words[w];
}

// Throws DeviceError naming `what` where the launch before it was refused.
inline void check_launch(const char* what) {
  const cudaError_t status = cudaGetLastError();
  require<DeviceError>(status == cudaSuccess, what, " could not be launched: ", cudaGetErrorString(status));
}

}  // namespace pacer::kernels
