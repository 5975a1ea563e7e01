// Some elements of a LAMB step in registers, from memory through either pass and back.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {

// N consecutive elements in registers: those of one row in a thread's columns, or a piece of an update tile.
template <AdamStorage kStorage, int N>
struct LambPacket {
  using Types = StorageOf<kStorage>;
  using Real = typename Types::Real;
  using Param = typename Types::Param;
  using State = typename Types::State;
  using Extra = typename Types::Extra;
  Param gradient[N];
  Param parameter[N];
  State exp_avg[N];
  State exp_avg_sq[N];
  Extra extra[N];

  __device__ static bool is_aligned(const AdamTensor& t, const void* g) {
    bool aligned = is_packet_aligned<Param, N>(static_cast<const Param*>(g)) &&
                   is_packet_aligned<Param, N>(static_cast<const Param*>(t.parameter)) &&
                   is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg)) &&
                   is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg_sq));
    if constexpr (Types::kHasExtra) {
      aligned = aligned && is_packet_aligned<Extra, N>(static_cast<const Extra*>(t.master_or_remainder));
    }
    return aligned;
  }

  __device__ __forceinline__ void load_gradient(const void* g, int64_t i) {
    load_some(static_cast<const Param*>(g) + i, gradient);
  }
  __device__ __forceinline__ void load_state(const AdamTensor& t, int64_t i) {
    load_some(static_cast<const Param*>(t.parameter) + i, parameter);
    if constexpr (Types::kHasExtra) load_some(static_cast<const Extra*>(t.master_or_remainder) + i, extra);
    load_some(static_cast<const State*>(t.exp_avg) + i, exp_avg);
    load_some(static_cast<const State*>(t.exp_avg_sq) + i, exp_avg_sq);
  }
  // Only the first `count`; the others are not touched.
  __device__ __forceinline__ void load_first(const AdamTensor& t, const void* g, int64_t i, int count) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= count) continue;
      gradient[k] = static_cast<const Param*>(g)[i + k];
      parameter[k] = static_cast<const Param*>(t.parameter)[i + k];
      if constexpr (Types::kHasExtra) extra[k] = static_cast<const Extra*>(t.master_or_remainder)[i + k];
      exp_avg[k] = static_cast<const State*>(t.exp_avg)[i + k];
      exp_avg_sq[k] = static_cast<const State*>(t.exp_avg_sq)[i + k];
    }
  }
  __device__ __forceinline__ StoredElement<kStorage> element(int k) const {
    StoredElement<kStorage> e;
    e.gradient = gradient[k];
    e.parameter = parameter[k];
    if constexpr (Types::kHasExtra) e.extra = extra[k];
    e.exp_avg = exp_avg[k];
    e.exp_avg_sq = exp_avg_sq[k];
    return e;
  }

  // The new moments, and the squares of the first `count` elements added to their columns.
  __device__ __forceinline__ void advance(const LambScalars<Real>& scalars, int count,
                                          Real (&parameter_columns)[N], Real (&update_columns)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= count) continue;
      StoredElement<kStorage> e = element(k);
      const LambTerms<Real> terms = lamb_moments(e, scalars);
      exp_avg[k] = e.exp_avg;
      exp_avg_sq[k] = e.exp_avg_sq;
      parameter_columns[k] = fma_(terms.parameter, terms.parameter, parameter_columns[k]);
      update_columns[k] = fma_(terms.update, terms.update, update_columns[k]);
    }
  }
  __device__ __forceinline__ void store_moments(const AdamTensor& t, int64_t i) const {
    store_some(static_cast<State*>(t.exp_avg) + i, exp_avg);
    store_some(static_cast<State*>(t.exp_avg_sq) + i, exp_avg_sq);
  }
  __device__ __forceinline__ void store_first_moments(const AdamTensor& t, int64_t i, int count) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= count) continue;
      static_cast<State*>(t.exp_avg)[i + k] = exp_avg[k];
      static_cast<State*>(t.exp_avg_sq)[i + k] = exp_avg_sq[k];
    }
  }

  // The new parameters.
  __device__ __forceinline__ void update(const LambScalars<Real>& scalars, Real step_size,
                                         int64_t real_index) {
    uint32_t random16[N] = {};
    draw_random16<kStorage, N>(scalars, real_index, random16);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      StoredElement<kStorage> e = element(k);
      lamb_step(e, scalars, step_size, random16[k]);
      parameter[k] = e.parameter;
      if constexpr (Types::kHasExtra) extra[k] = e.extra;
    }
  }
  __device__ __forceinline__ void store_parameters(const AdamTensor& t, int64_t i) const {
    store_some(static_cast<Param*>(t.parameter) + i, parameter);
    if constexpr (Types::kHasExtra) store_some(static_cast<Extra*>(t.master_or_remainder) + i, extra);
  }
};

}  // namespace pacer::kernels
