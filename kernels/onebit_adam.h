// The kernels of 1-bit Adam: what becomes the momentum, and what the momentum does to the parameters. Between
// them lies the exchange (kernels/onebit.h). 1-bit LAMB has the same momentum (kernels/onebit_lamb.h). One
// flat buffer of momentum and variance for all tensors; parameters and gradients stay where they are. Raw
// pointers; on the CPU single-threaded, by rows and units of the buffer; no LibTorch.
#pragma once

#include <cstdint>
#include <limits>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/onebit_adam.h>
#include <pacer/kernels/onebit.h>

namespace pacer::kernels {

// One tensor of fp32, or of 16 bits with a master copy or remainder. Where its scalars say skip, it sits the
// step out: parameter and variance stay as they are, and so does a dense momentum, while one that travels as
// signs travels on with a gradient of zero.
struct OneBitAdamTensor {
  void* parameter = nullptr;
  void* master_or_remainder = nullptr;     // null where there is neither
  const void* gradient = nullptr;          // of the parameter's dtype; null counts as zero
  int64_t begin = 0;                       // of its elements in the buffer
  int64_t scalars = 0;                     // index into the scalars
  AdamStorage storage = AdamStorage::f32;  // or 16 bits with a master copy, a remainder or a correction
  VarianceRefresh refresh;
  float largest = std::numeric_limits<float>::infinity();  // as largest_direction says
};
inline bool operator==(const OneBitAdamTensor& a, const OneBitAdamTensor& b) {
  return a.parameter == b.parameter && a.master_or_remainder == b.master_or_remainder &&
         a.gradient == b.gradient && a.begin == b.begin && a.scalars == b.scalars && a.storage == b.storage &&
         a.refresh.keep == b.refresh.keep && a.refresh.take == b.refresh.take && a.largest == b.largest;
}

// The tensors of a step and what it reads and writes, in host or device memory.
struct OneBitAdamWork {
  const OneBitAdamTensor* tensors;
  const StepScalars* scalars;
  // A factor for each tensor: its momentum travels multiplied with it, and what arrives is divided by it.
  // Null: momentum travels as it is.
  const float* momentum_scales;
  const float* floors;  // of the variance, one for each tensor, as frozen_bounds has them
  float* variance;      // bias-corrected, padding 0
  // Null: the momentum is `bits`. On CUDA the exchange's status decides where this is not null.
  const float* dense_momentum;
  OneBitMessages bits;
  bool is_from_signs;  // the momentum, now or in what a dense one has kept of earlier steps

  // The scalars of the tensor's step group.
  template <class Scalars = AdamScalars<float>>
  PACER_HOST_DEVICE const Scalars& scalars_of(const OneBitAdamTensor& tensor) const {
    return scalars[tensor.scalars].as<Scalars>();
  }
  // What the variance of the tensor of that number is used with.
  PACER_HOST_DEVICE FrozenBounds bounds_of(uint32_t tensor) const {
    return frozen_bounds(floors[tensor], tensors[tensor].largest, is_from_signs);
  }
  // The scalars of the tensor's step group that the moments need.
  PACER_HOST_DEVICE const MomentScalars<float>& moments_of(const OneBitAdamTensor& tensor) const {
    return scalars_of<MomentScalars<float>>(tensor);
  }
};

// The joint sum of squares of gradients that are each rank's own, as if they had been added over ranks whose
// noise does not cancel, and of those that are averaged already.
PACER_HOST_DEVICE double joint_sum_of_squares(const double* own, int64_t ranks, double weight,
                                              double averaged) {
  double total = own[0];
  for (int64_t rank = 1; rank < ranks; ++rank) total += own[rank];
  return mul_(mul_(weight, weight), total) + averaged;
}

// A share of each tensor's mean variance; where its own is zero, that of all elements, negated.
PACER_HOST_DEVICE float variance_floor(double share, double sum, int64_t count, double total,
                                       int64_t elements) {
  const bool own = sum > 0 || elements == 0;
  const double mean =
      own ? sum / static_cast<double>(count > 0 ? count : 1) : total / static_cast<double>(elements);
  return static_cast<float>(own ? share * mean : -(share * mean));
}

// ---- CPU ----

// The real elements of the buffer, row by row, as in OneBitSide.
struct OneBitAdamRows {
  OneBitAdamWork work;
  const OneBitPiece* pieces;
  const int64_t* first;
  int64_t rows;
  int64_t extent;
};

// What a OneBitSource writes of a row: beta1 * m + (1 - beta1) * g, 0 in the padding, times the momentum scales
// where there are some.
void onebit_momentum_row(const OneBitAdamRows& rows, int64_t row, int64_t width, float* values);

// The same for all rows of a unit, kept as the new momentum. It may be `dense_momentum` itself.
void onebit_dense_momentum_cpu(const OneBitAdamRows& rows, int64_t unit, float* momentum);
// The variance takes in the gradients.
void onebit_refresh_cpu(const OneBitAdamRows& rows, int64_t unit);
// The parameters take the step.
void onebit_update_cpu(const OneBitAdamRows& rows, int64_t unit);

// The momentum of a row, whatever its form.
void onebit_read_momentum(const OneBitAdamRows& rows, int64_t row, int64_t width, float* values);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Elements of the tiles of the kernels below: a thread block's share, and a warp's. A tile's offset is where
// it begins in the buffer.
constexpr int64_t kOneBitBlockTile = 512;
constexpr int64_t kOneBitWarpTile = 128;

// The worker's side. `storage`: of all tensors, or none where they differ.
struct OneBitStorage {
  bool same;
  AdamStorage storage;
};
// Does what onebit_compress_cpu does with the source of the momentum, for all units of `side`.
void onebit_compress_momentum_cuda(const OneBitCudaSide& side, const OneBitAdamWork& work,
                                   OneBitStorage storage, const OneBitControl& control, Stream stream);
// For the tensors of one dtype set. momentum = beta1 * m + (1 - beta1) * g, which may be `dense_momentum`
// itself; where `refresh`, the variance takes in the gradients.
void onebit_dense_momentum_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitAdamWork& work,
                                float* momentum, bool refresh, const OneBitControl& control, Stream stream);
// The parameters take the step: with the dense momentum where `dense`, else with the bits.
void onebit_update_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitAdamWork& work, bool dense,
                        const OneBitControl& control, Stream stream);

// Units are tiles of at most kReductionUnit elements; those of one tensor lie side by side. From the units'
// sums of magnitudes to the floors: sums (scratch) and floors one for each tensor, `total` of all.
struct OneBitFloors {
  const double* partials;
  const TileRange* units;  // by tensor
  const int64_t* counts;   // elements, by tensor
  int64_t tensors;
  int64_t elements;  // of all
  double share;
  double* sums;
  double* total;
  float* floors;
};
// Writes the floor of each tensor's variance.
void onebit_floors_cuda(const OneBitFloors& floors, const OneBitControl& control, Stream stream);

// Writes joint_sum_of_squares of the same arguments to `total`.
void joint_sum_of_squares_cuda(const double* own, int64_t ranks, double weight, const double* averaged,
                               double* total, Stream stream);

}  // namespace pacer::kernels
