// The kernels of 1-bit LAMB after the freeze, beside those it shares with 1-bit Adam (kernels/onebit_adam.h).
// What the momentum does to the parameters needs the largest ratio of denominators and two norms of every
// tensor, so it is three kernels:
//
//   moments   reads bits p v v_fresh, writes v_fresh: per unit the ratio and the sums of squares of u0 and u
//   factors   per tensor: f, from its units, and the size of the step
//   update    reads bits p v, writes p
//
// 28.4 bytes an element in fp32. Sums are in the order of core/reduction_order.h.
#pragma once

#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/onebit_lamb.h>
#include <pacer/kernels/onebit_adam.h>

namespace pacer::kernels {

// What a unit knows of its tensor.
struct OneBitLambPartials {
  float* ratio;       // the largest
  double* direction;  // sum of squares of u0
  double* update;     // and of u
};

// The units of one tensor, and the bounds of its factor.
struct OneBitLambTensor {
  TileRange units;
  LambFactorBounds bounds;
};

// One compressed step of 1-bit LAMB over all tensors of one set of dtypes.
struct OneBitLambWork {
  OneBitAdamWork now;  // its momentum is the new one
  // The momentum before this step. Dense where not null; on CUDA only if `before` had no mean.
  const float* dense_before;
  OneBitMessages bits_before;
  const OneBitStatus* before;  // CUDA: the exchange's status before this step; null: there is no exchange

  float* fresh_variance;  // a flat buffer
  // Each has one element for each tensor.
  const OneBitLambTensor* tensors;
  const double* coefficients;
  double* factors;  // in: of the step before, out: of this one
  float* step_sizes;
  OneBitLambPartials partials;  // by unit
};

// ---- CPU ----

// Units are tiles of at most kReductionUnit elements from multiples of it on; `index` is the unit's number.
void onebit_lamb_moments_cpu(const OneBitLambWork& work, const Tile& unit, int64_t index);
void onebit_lamb_factor_cpu(const OneBitLambWork& work, int64_t tensor);
void onebit_lamb_update_cpu(const OneBitLambWork& work, const Tile& unit);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Computes the moments of the tensors of one dtype set. places[i] is the number of its unit i; `dense`: the
// new momentum is dense_momentum.
void onebit_lamb_moments_cuda(AdamStorage storage, const Tile* units, const uint32_t* places, int64_t count,
                              const OneBitLambWork& work, bool dense, const OneBitControl& control,
                              Stream stream);
// Computes the factors of all tensors.
void onebit_lamb_factors_cuda(int64_t tensors, const OneBitLambWork& work, const OneBitControl& control,
                              Stream stream);
// Tiles as for onebit_update_cuda.
void onebit_lamb_update_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitLambWork& work,
                             bool dense, const OneBitControl& control, Stream stream);

}  // namespace pacer::kernels
