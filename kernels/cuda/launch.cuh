// Helpers every CUDA source shares: wide loads and stores, and the check after a launch.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_runtime.h>

#include <pacer/core/error.h>

namespace pacer::kernels {

constexpr int kWarp = 32;

// Alignment, in bytes, that load_packet and store_packet need for N elements of T.
template <class T, int N>
constexpr uintptr_t kPacketAlignment = sizeof(T) * N >= 16 ? 16 : sizeof(T) * N;

template <class T, int N>
__device__ __forceinline__ bool is_packet_aligned(const T* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & (kPacketAlignment<T, N> - 1)) == 0;
}

// On the host: as the widest accesses need it.
inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

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
template <>
struct WordOf<4> {
  using type = uint32_t;
};

}  // namespace detail

// N consecutive elements in accesses of 16 (or 8, or 4) bytes.
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

// Programmatic dependent launch (compute capability 9.0 and later; elsewhere a plain sequence): a kernel
// launched with launch_overlapped may start while the kernel before it still runs, provided that one called
// let_next_kernel_start; it must call wait_for_previous_kernel before it reads what that kernel writes, or
// writes anything itself.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

template <class... Parameters, class... Arguments>
void launch_overlapped(const char* what, bool overlap_wanted, void (*kernel)(Parameters...), unsigned blocks,
                       unsigned threads, cudaStream_t stream, Arguments... arguments) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlap_wanted && major >= 9 ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  require<DeviceError>(status == cudaSuccess, what, " could not be launched: ", cudaGetErrorString(status));
}

}  // namespace pacer::kernels
