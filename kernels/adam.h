// The Adam kernels as the optimizers call them: raw pointers, one description for CPU and CUDA, no LibTorch.
// One call updates any number of tensors of one dtype set. Tensors may have different scalars (learning rate,
// step count), chosen per tensor by an index, and any tensor may sit a step out.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/math/schedule_free.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// Memory of one tensor, `count` contiguous elements each. The kernel reads gradient and state, writes
// parameter and state. exp_avg_sq is null for a rule of one moment, max_exp_avg_sq without amsgrad,
// master_or_remainder where there is neither.
struct AdamTensor {
  void* parameter;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;
  void* master_or_remainder;
  int64_t first_element;  // number of real elements registered before this tensor (stochastic rounding)
  // The scales of moments in 8 bits, one for each group of 32 elements; null for all others.
  void* exp_avg_scale = nullptr;
  void* exp_avg_sq_scale = nullptr;
};

// What changes from step to step: a null gradient leaves the tensor alone.
struct AdamGradient {
  const void* gradient;
  int64_t scalars;  // index into the scalars

  bool operator==(const AdamGradient& other) const {
    return gradient == other.gradient && scalars == other.scalars;
  }
};

// The rows of a tensor that steps change: elements [r * width, (r + 1) * width) for each r where visible[r] is true.
// All of them where it is null.
struct RowMask {
  const bool* visible = nullptr;
  int64_t width = 0;

  bool operator==(const RowMask& other) const { return visible == other.visible && width == other.width; }
};

// What one launch of the kernel does: the dtypes, the rule, and what it may assume of the launch before it.
struct AdamLaunch {
  AdamStorage storage;
  bool amsgrad;
  // CUDA only: this launch directly follows adam_prologue_cuda on its stream, so it may load while that still
  // runs.
  bool follows_prologue = false;
  // Those of the rule; null: Adam's.
  const struct UpdateLoops* loops = nullptr;
  // CUDA only: device memory, by tensor; null: all rows of all tensors. The masks are read, too, before what
  // follows_prologue speaks of.
  const RowMask* rows = nullptr;
};

struct AdamTiles;
union StepScalars;

// The loops of a rule over tiles: what adam_cpu and adam_cuda do, for one that is not Adam (the element_loop
// headers in cpu/ and cuda/).
struct UpdateLoops {
  // Updates the elements of a tile.
  void (*cpu)(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors, const AdamGradient* gradients,
              const StepScalars* scalars);
  // Enqueues the same for all tiles. Null: there is no loop for GPUs.
  void (*cuda)(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
};

// What a step of a step group's tensors reads: the scalars of the group's rule, of double for
// AdamStorage::f64 and of float for all others. Arrays of it are indexed by AdamGradient::scalars.
union StepScalars {
  AdamScalars<float> adam;
  AdamScalars<double> adam_double;
  LambScalars<float> lamb;
  LambScalars<double> lamb_double;

  // Makes `adam` the active member.
  PACER_HOST_DEVICE void set(const AdamScalars<float>& scalars) { adam = scalars; }
  // Makes `adam_double` the active member.
  PACER_HOST_DEVICE void set(const AdamScalars<double>& scalars) { adam_double = scalars; }
  // Makes `lamb` the active member.
  PACER_HOST_DEVICE void set(const LambScalars<float>& scalars) { lamb = scalars; }
  // Makes `lamb_double` the active member.
  PACER_HOST_DEVICE void set(const LambScalars<double>& scalars) { lamb_double = scalars; }

  // The member of that type, or what the scalars of every rule of float begin with.
  template <class Scalars>
  PACER_HOST_DEVICE const Scalars& as() const {
    if constexpr (std::is_same_v<Scalars, AdamScalars<double>>) {
      return adam_double;
    } else if constexpr (std::is_same_v<Scalars, LambScalars<float>>) {
      return lamb;
    } else if constexpr (std::is_same_v<Scalars, LambScalars<double>>) {
      return lamb_double;
    } else {
      return adam;  // or its base, MomentScalars<float>
    }
  }
};
static_assert(sizeof(StepScalars) == 128);

// The scalars of a rule of float with another factor of the gradients.
PACER_HOST_DEVICE StepScalars with_factor(StepScalars scalars, double factor) {
  MomentScalars<float>& moments = scalars.adam;
  moments.factor = static_cast<float>(factor);
  return scalars;
}

// Elements [offset, offset + count) of the tile's tensor, single-threaded, memory-bound. Results do not
// depend on how elements are tiled. Denormals are computed in full whatever the caller's mode (FTZ, DAZ),
// which is restored.
void adam_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors, const AdamGradient* gradients,
              const StepScalars* scalars);

// The tensors that share settings and step count, and so the scalars of a step.
struct StepGroup {
  RuleSettings settings;
  uint32_t is_double;  // write AdamScalars<double> rather than AdamScalars<float>
  uint32_t active;     // 0: none of its tensors takes part; the step count stays and the scalars say skip
  // Where a step has a GradientCheck the settings' factor is multiplied with this, too, which lies where that does: a clip
  // factor of its own. Null: 1.
  const double* clip = nullptr;
};
inline bool operator==(const StepGroup& a, const StepGroup& b) {
  return a.settings == b.settings && a.is_double == b.is_double && a.active == b.active && a.clip == b.clip;
}

// What a step group has behind it: its steps, and what the average of schedule_free.h has taken in.
struct StepCount {
  int64_t steps = 0;
  AverageWeights average;
};
static_assert(sizeof(StepCount) == 24);

// The scalars of step number `step` (1 for the first). `average` is that of the steps before; where the rule
// averages it takes this step in. Full denormals here, too.
void adam_scalars_cpu(const StepGroup& group, int64_t step, StepScalars& scalars, AverageWeights& average);
// The same of a rule without an average, or for what does not depend on it.
inline void adam_scalars_cpu(const StepGroup& group, int64_t step, StepScalars& scalars) {
  AverageWeights average;
  adam_scalars_cpu(group, step, scalars, average);
}

// Copies the scalars of `count` step groups, of a rule of float, but for the factor of the gradients.
void replace_factor_cpu(const StepScalars* scalars, int64_t count, double factor, StepScalars* replaced);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Elements per tile that adam_cuda expects: a thread block's share, and a warp's for tensors so small that a
// block would idle.
int64_t adam_cuda_block_tile(AdamStorage storage);
int64_t adam_cuda_warp_tile(AdamStorage storage);

// Tiles [0, block_tiles) are worked on by one block each, the following warp_tiles by one warp each.
struct AdamTiles {
  const Tile* tiles;
  int64_t block_tiles;
  int64_t warp_tiles;
};

// One launch, whatever the number of tensors. Throws DeviceError where the launch is refused.
void adam_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

// Advances counts[i] of the active step groups and writes the scalars of all, on the device, in double. Where
// `check` is not null the settings' factor is multiplied with its own and with *clip, and where it is non-finite
// the counts stay and the scalars say skip.
void adam_prologue_cuda(const StepGroup* groups, int64_t count, StepCount* counts, StepScalars* scalars,
                        const GradientCheck* check, Stream stream);

// The same on the device, where the factor is, too.
void replace_factor_cuda(const StepScalars* scalars, int64_t count, const double* factor,
                         StepScalars* replaced, Stream stream);

}  // namespace pacer::kernels
