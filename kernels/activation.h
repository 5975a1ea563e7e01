// GELU and SwiGLU between the two products of a feed-forward network: forward with the bias before it, and
// backward with the gradient of that bias. Both make 16-bit or fp32 results, 8-bit floats, or both, in one
// pass. The same bytes on CPU and GPU, apart from the bits of a NaN.
//
// bf16: forward reads 2 bytes an element of u and writes 2 for y, 1 for codes, 1 for their transpose;
// backward reads u and dy and writes 2 for du, 1 for codes, 1 for their transpose.
#pragma once

#include <cstdint>

#include <pacer/kernels/choices.h>
#include <pacer/kernels/fp8.h>
#include <pacer/kernels/math/activation.h>
#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// Columns of u and du for each column of y.
constexpr int64_t activation_inputs(Activation activation) { return activation == Activation::gelu ? 1 : 2; }

// y = activation(u + bias), in fp32 and rounded once to `type`. Matrices lie in memory without gaps, and no
// output overlaps an input.
struct ActivationForward {
  Activation activation = Activation::gelu;
  ElementType type = ElementType::f32;  // of u, bias and y
  int64_t rows = 0, columns = 0;        // of y
  const void* u = nullptr;              // [rows, columns], for swiglu [rows, 2 * columns]
  const void* bias = nullptr;           // [columns], for swiglu [2 * columns]; null: none
  void* y = nullptr;                    // [rows, columns]; null: not wanted
  // Where it has codes or `measured`: codes of y as rounded to `type`, transposed if wanted, or y measured,
  // also while y itself is written.
  Fp8Target to{};
};

// Rows [begin, end), single-threaded; no two threads at once where `to` is used.
void activation_cpu(const ActivationForward& work, int64_t begin, int64_t end);

// du = dy * activation'(u + bias), in fp32 and rounded once to `type`.
struct ActivationBackward {
  Activation activation = Activation::gelu;
  ElementType type = ElementType::f32;  // of u, bias, dy and du
  int64_t rows = 0, columns = 0;        // of dy
  const void* u = nullptr;              // as in forward
  const void* bias = nullptr;           // as in forward
  const void* dy = nullptr;             // [rows, columns]
  void* du = nullptr;                   // of the shape of u; null: not wanted
  Fp8Target to{};                       // of du as rounded to `type`, as in forward, transposed if wanted
  // Sums of du as rounded to `type`, in the order of kernels/fp8.h and under the conditions of Fp8Cast, where
  // du counts as codes do: [fp8_parts(rows), columns of u] as scratch, and [columns of u].
  float* partials = nullptr;
  float* bias_gradient = nullptr;  // null: not wanted
};

// Rows [begin, end) as for fp8_cast_cpu.
void activation_backward_cpu(const ActivationBackward& work, int64_t begin, int64_t end);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Throw InvalidArgument for columns that are no multiple of 8, for sides of a transpose that are no multiples
// of 16, and for memory that does not begin at a multiple of 16 bytes.
void activation_cuda(const ActivationForward& work, Stream stream);
void activation_backward_cuda(const ActivationBackward& work, Stream stream);

}  // namespace pacer::kernels
