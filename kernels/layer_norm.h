// Layer normalisation of rows (Ba et al., "Layer Normalization", arXiv:1607.06450), with the residual
// connection before it:
//
//   s = x + drop(branch + branch_bias)
//   y = (s - mean) / sqrt(variance + epsilon) * weight + bias
//
// or by the root of the mean square (Normalization::rms; Zhang and Sennrich, "Root Mean Square Layer
// Normalization", arXiv:1910.07467), which is the same with a mean of 0 and without a bias:
//
//   y = s / sqrt(mean of s^2 + epsilon) * weight
//
// y goes to 16 or 32 bits, to 8-bit floats, or to both. The same bytes on CPU and GPU, apart from the bits of
// a NaN; sums have the order of kernels/math/layer_norm.h.
//
// Bytes an element, bf16 everywhere: forward reads 2 (4 with a branch) and writes 2 (4), with codes 1 more or
// instead; backward reads 4 (6 where a gradient is added) and writes 2.
#pragma once

#include <cstdint>

#include <pacer/kernels/choices.h>
#include <pacer/kernels/math/dropout.h>
#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/math/layer_norm.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// Matrices lie in memory without gaps, row by row. Types: a residual stream of 32 bits goes with a branch of
// any type and parameters of 32 bits; one of 16 bits with a branch of its type and parameters of its type or
// of 32 bits.
struct LayerNormForward {
  Normalization normalization = Normalization::layer;
  ElementType stream = ElementType::f32;          // of x and sum
  ElementType branch_type = ElementType::f32;     // of branch, branch_bias and y
  ElementType parameter_type = ElementType::f32;  // of weight and bias
  int64_t rows = 0, columns = 0;
  const void* x = nullptr;            // (rows, columns); null: zeros, where there is a branch
  const void* branch = nullptr;       // (rows, columns); null: s = x
  const void* branch_bias = nullptr;  // (columns); null: none
  Dropout dropout;                    // of branch + branch_bias; element row * columns + column
  void* sum = nullptr;                // s, (rows, columns), may be x; null: not kept
  const void* weight = nullptr;       // (columns); null: only `sum` is made
  const void* bias = nullptr;         // (columns); null: none, as with rms
  float epsilon = 1e-5f;
  void* y = nullptr;      // (rows, columns); null: not kept
  float* mean = nullptr;  // (rows); null: not kept, as with rms
  float* rstd = nullptr;  // (rows), what s - mean is multiplied with; null: not kept
  Fp8Target to;           // of y as rounded to branch_type, so that codes equal a later cast's
};

// Where only a measurement is wanted (`to` without codes, no sum, y or statistics) and that is superfluous,
// nothing is done.
PACER_HOST_DEVICE bool is_superfluous(const LayerNormForward& work) {
  return work.sum == nullptr && work.y == nullptr && work.mean == nullptr && work.rstd == nullptr &&
         is_superfluous(work.to);
}

// The gradients of x (or, behind a residual connection, of s), of weight and of bias.
struct LayerNormBackward {
  Normalization normalization = Normalization::layer;
  ElementType stream = ElementType::f32;          // of s, dsum and dx
  ElementType gradient_type = ElementType::f32;   // of dy: branch_type of the forward pass
  ElementType parameter_type = ElementType::f32;  // of weight
  int64_t rows = 0, columns = 0;
  const void* dy = nullptr;      // (rows, columns)
  const void* s = nullptr;       // (rows, columns), what was normalised
  const float* mean = nullptr;   // (rows); not read with rms
  const float* rstd = nullptr;   // (rows)
  const void* weight = nullptr;  // (columns)
  const void* dsum = nullptr;    // (rows, columns), the gradient of s from elsewhere, added; null: none
  void* dx = nullptr;            // (rows, columns), may be dsum
  // (2, layer_norm_parts(rows, columns), columns), with rms (1, parts, columns), scratch; null: only dx
  float* partials = nullptr;
  float* dweight = nullptr;  // (columns)
  float* dbias = nullptr;    // (columns); null: not wanted, as with rms
};

// Throw InvalidArgument for types and wishes that do not go together. All functions below begin with them.
void check_layer_norm(const LayerNormForward& work);
void check_layer_norm(const LayerNormBackward& work);

// Rows [begin, end), single-threaded; where `to` is used, no two threads at once.
void layer_norm_cpu(const LayerNormForward& work, int64_t begin, int64_t end);
// Parts [begin, end) of layer_norm_parts(rows, columns), single-threaded: dx of their rows, and partials.
void layer_norm_backward_cpu(const LayerNormBackward& work, int64_t begin, int64_t end);
// After all parts: columns [begin, end) of dweight and dbias.
void layer_norm_parameters_cpu(const LayerNormBackward& work, int64_t begin, int64_t end);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Throw InvalidArgument for columns that are no multiple of 8 or more than kLayerNormCudaColumns, and for
// memory that does not begin at a multiple of 16 bytes.
constexpr int64_t kLayerNormCudaColumns = 16384;
void layer_norm_cuda(const LayerNormForward& work, Stream stream);
// Computes dweight and dbias, too.
void layer_norm_backward_cuda(const LayerNormBackward& work, Stream stream);

}  // namespace pacer::kernels
