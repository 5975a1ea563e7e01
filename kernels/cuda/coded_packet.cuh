// Some elements whose moments lie in memory as codes, in registers, and what the threads that share a group of codes find
// together: the largest moment of it.
#pragma once

#include <cstdint>

#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {

// The first `count` of N consecutive elements of memory, or with `whole` all of them as one packet, aligned as for
// load_packet. The others are neither read, but zeros, nor written.
template <class T, int N>
__device__ __forceinline__ void load_up_to(const T* memory, int count, bool whole, T (&values)[N]) {
  if (whole) return load_packet(memory, values);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = k < count ? memory[k] : T{};
  }
}
template <class T, int N>
__device__ __forceinline__ void store_up_to(T* memory, int count, bool whole, const T (&values)[N]) {
  if (whole) return store_packet(memory, values);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < count) memory[k] = values[k];
  }
}

// N consecutive elements in registers, of which a load and a store have the first `count`, as above.
template <class Format, AdamStorage kStorage, int N>
struct CodedPacket {
  using Types = StorageOf<kStorage>;
  using Param = typename Types::Param;
  using Extra = typename Types::Extra;
  using FirstCode = typename Format::FirstCode;
  using SecondCode = typename Format::SecondCode;
  Param gradient[N];
  Param parameter[N];
  Extra extra[N];
  FirstCode exp_avg[N];
  SecondCode exp_avg_sq[N];

  __device__ static bool is_aligned(const AdamTensor& t, const void* g) {
    uintptr_t odd = beyond<Param>(g) | beyond<Param>(t.parameter) | beyond<FirstCode>(t.exp_avg) |
                    beyond<SecondCode>(t.exp_avg_sq);
    if constexpr (Types::kHasExtra) odd |= beyond<Extra>(t.master_or_remainder);
    return odd == 0;
  }
  // The bytes between a pointer and what is aligned for a packet before it.
  template <class T>
  __device__ static uintptr_t beyond(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) & (kPacketAlignment<T, N> - 1);
  }

  __device__ __forceinline__ void load(const AdamTensor& t, const void* g, int64_t i, int count, bool whole) {
    load_up_to(static_cast<const Param*>(g) + i, count, whole, gradient);
    load_state(t, i, count, whole);
  }
  // All but the gradient.
  __device__ __forceinline__ void load_state(const AdamTensor& t, int64_t i, int count, bool whole) {
    load_up_to(static_cast<const Param*>(t.parameter) + i, count, whole, parameter);
    load_up_to(static_cast<const FirstCode*>(t.exp_avg) + i, count, whole, exp_avg);
    load_up_to(static_cast<const SecondCode*>(t.exp_avg_sq) + i, count, whole, exp_avg_sq);
    if constexpr (Types::kHasExtra)
      load_up_to(static_cast<const Extra*>(t.master_or_remainder) + i, count, whole, extra);
  }

  __device__ __forceinline__ void store(const AdamTensor& t, int64_t i, int count, bool whole) const {
    store_parameters(t, i, count, whole);
    store_moments(t, i, count, whole);
  }
  __device__ __forceinline__ void store_parameters(const AdamTensor& t, int64_t i, int count,
                                                   bool whole) const {
    store_up_to(static_cast<Param*>(t.parameter) + i, count, whole, parameter);
    if constexpr (Types::kHasExtra)
      store_up_to(static_cast<Extra*>(t.master_or_remainder) + i, count, whole, extra);
  }
  __device__ __forceinline__ void store_moments(const AdamTensor& t, int64_t i, int count, bool whole) const {
    store_up_to(static_cast<FirstCode*>(t.exp_avg) + i, count, whole, exp_avg);
    store_up_to(static_cast<SecondCode*>(t.exp_avg_sq) + i, count, whole, exp_avg_sq);
  }

  // Element k for load_parameter and store_parameter.
  __device__ __forceinline__ StoredElement<kStorage> element(int k) const {
    StoredElement<kStorage> stored{};
    stored.parameter = parameter[k];
    stored.extra = extra[k];
    return stored;
  }
  __device__ __forceinline__ void set_element(int k, const StoredElement<kStorage>& stored) {
    parameter[k] = stored.parameter;
    extra[k] = stored.extra;
  }
};

// Eight elements a thread, so that what a group costs is shared among them.
constexpr int kCodedPacket = 8;
template <AdamStorage kStorage>
constexpr int kCodedThreads = kPacket<kStorage>* ElementPolicy<kStorage>::kThreads / kCodedPacket;

// The largest over the kLanes threads of a group, for each of them. All threads of the warp come here.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_group(uint32_t largest) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, apart));
  }
  return largest;
}

}  // namespace pacer::kernels
