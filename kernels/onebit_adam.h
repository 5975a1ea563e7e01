// The 1-bit Adam kernels: what becomes the momentum, and what the momentum does to the parameters. Between
// them lies the exchange (kernels/onebit.h). One flat buffer of momentum and variance for all tensors;
// parameters and gradients stay where they are. Raw pointers, single-threaded, by rows and units of the
// buffer; no LibTorch.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/onebit_adam.h>
#include <pacer/kernels/onebit.h>

namespace pacer::kernels {

// One tensor of fp32, or of 16 bits with a master copy or remainder.
struct OneBitAdamTensor {
  void* parameter;
  void* extra;           // master copy or remainder, null where there is none
  const void* gradient;  // of the parameter's dtype; null counts as zero
  AdamStorage storage;   // f32, bf16_master, f16_master or bf16_remainder
  float floor;           // of the variance
  VarianceRefresh refresh;
  AdamScalars<float> scalars;
};

struct OneBitAdamWork {
  const OneBitPiece* pieces;  // of the whole buffer, as in OneBitSide
  const int64_t* first;
  int64_t rows;
  int64_t extent;
  const OneBitAdamTensor* tensors;
  float* variance;              // bias-corrected, padding 0
  const float* dense_momentum;  // null: the momentum is `bits`
  OneBitMessages bits;
};

// A OneBitSource over a OneBitAdamWork: beta1 * m + (1 - beta1) * g of a row, 0 in the padding.
void onebit_momentum_row(const void* work, int64_t row, int64_t width, float* values);

// The same for all rows of a unit, kept as the new momentum. It may be `dense_momentum` itself.
void onebit_dense_momentum_cpu(const OneBitAdamWork& work, int64_t unit, float* momentum);
// The variance takes in the gradients.
void onebit_refresh_cpu(const OneBitAdamWork& work, int64_t unit);
// The parameters take the step.
void onebit_update_cpu(const OneBitAdamWork& work, int64_t unit);

// The momentum of a row, whatever its form.
void onebit_read_momentum(const OneBitAdamWork& work, int64_t row, int64_t width, float* values);

}  // namespace pacer::kernels
