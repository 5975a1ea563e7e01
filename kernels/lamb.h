// The LAMB kernels as the optimizers call them: raw pointers, one description for CPU and CUDA, no LibTorch.
// Tensors, gradients and dtype sets are those of the Adam kernels; the scalars of a step group are
// LambScalars where its settings say UpdateRule::lamb. A step is three kernels over all tensors of a dtype
// set:
//
//   moments   reads g p m v, writes m v: the new moments, and per unit the sums of squares of p and u
//   ratio     per tensor: the trust ratio from the sums of its units
//   update    reads p m v, writes p
//
// 40 bytes per parameter in fp32. Sums are added in the order of core/reduction_order.h, so that CPU and GPU
// agree to the bit. fp32 squares bound the norms: elements of p or u beyond 1.8e19 make an infinite sum,
// elements below 2.7e-23 count as 0.
#pragma once

#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// Sums of squares by unit. Units are tiles of at most kReductionUnit elements that start on multiples of it;
// those of one tensor lie side by side in the list.
struct LambPartials {
  double* parameter;
  double* update;
};

// These work on one unit, one tensor and one tile, single-threaded, memory-bound. `scalars` has those of all
// step groups (adam_scalars_cpu). A tensor without a gradient, or told to skip, is left alone and its sums
// and ratio are not written. max_exp_avg_sq is not used. Denormals as in adam_cpu.
void lamb_moments_cpu(AdamStorage storage, const Tile& unit, const AdamTensor* tensors,
                      const AdamGradient* gradients, const StepScalars* scalars, double* parameter_partial,
                      double* update_partial);
void lamb_ratio_cpu(AdamStorage storage, const TileRange& units, const AdamGradient& gradient,
                    const StepScalars* scalars, const LambPartials& partials, LambRatio* ratio,
                    LambAverage* average = nullptr);
void lamb_update_cpu(AdamStorage storage, const Tile& tile, const AdamTensor* tensors,
                     const AdamGradient* gradients, const StepScalars* scalars, const LambRatio* ratios);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Tensors of at most this many elements can be a warp's: a block would idle.
constexpr int64_t kLambWarpUnit = 128;

// One step of LAMB over all tensors of one set of dtypes.
struct LambWork {
  // The units: those for blocks first, then those for warps, each a whole tensor of at most kLambWarpUnit
  // elements.
  AdamTiles units;
  AdamTiles tiles;            // of the update, cut as for adam_cuda
  const TileRange* units_of;  // by tensor
  int64_t tensors;
  LambPartials partials;         // by unit
  LambRatio* ratios;             // by tensor
  LambAverage* const* averages;  // null, or by tensor, null for one that has none
};

// Which kernels are launched: where ranks share tensors out, they exchange their sums before the ratios.
enum class LambLaunches { all, moments, ratio_and_update };

// Three launches, whatever the number of tensors. Throws DeviceError where one is refused. `follows_prologue`
// as in AdamLaunch.
void lamb_cuda(AdamStorage storage, const LambWork& work, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, bool follows_prologue,
               Stream stream, LambLaunches which = LambLaunches::all);

// The loops of a format of moments: those above, or those of lamb_8bit.h, which have the same arguments.
struct LambLoops {
  decltype(&lamb_moments_cpu) moments_cpu;
  decltype(&lamb_update_cpu) update_cpu;
  decltype(&lamb_cuda) cuda;
};
extern const LambLoops kLambLoops;

}  // namespace pacer::kernels
