// Casts to 8-bit floats: q = x * scale, saturated and rounded to nearest even (kernels/math/fp8.h), with the
// largest magnitude of x on the way, with the transpose that matrix products of 8-bit floats need, with
// dropout before and with the sums of columns, the gradient of a bias. The same bytes on CPU and GPU, apart
// from the bits of a NaN in a sum.
//
// bf16: cast reads 2 and writes 1 byte an element, cast_transpose writes 2, and dropout and sums add none.
#pragma once

#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/dropout.h>
#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// Columns are summed in fp32 in one order, which depends on nothing but the number of rows:
//
//   part     kFp8PartRows neighbouring rows; a row that is missing in the last one counts as 0
//   four     (((0 + r0) + r1) + r2) + r3, of four neighbouring rows of the part
//   part     the 32 fours as a balanced tree of neighbours, (f0 + f1) + (f2 + f3), ...
//   strand   part s, s + kFp8Strands, s + 2 * kFp8Strands, ... in that order, beginning with 0
//   sum      the strands as a balanced tree of neighbours
constexpr int64_t kFp8PartRows = 128;
constexpr int kFp8Strands = 8;
inline int64_t fp8_parts(int64_t rows) { return ceil_divide(rows, kFp8PartRows); }

// A matrix in memory without gaps, row by row, and where its codes go. No output overlaps an input.
struct Fp8Cast {
  ElementType type = ElementType::f32;  // of x
  const void* x = nullptr;              // [rows, columns]
  int64_t rows = 0, columns = 0;
  Fp8Target to{};
  // Two matrices to the right of x, as gradients of queries, keys and values are: all three are [rows,
  // columns / 3], and nothing is dropped. Null: x alone.
  const void* beside[2] = {};
  // The dropout of x, in fp32 and before everything else. Element i = row * columns + column takes draw i % 4
  // of four i / 4, as in the forward pass; `columns` is a multiple of 4 where anything is dropped.
  Dropout dropout{};
  // Sums of what is cast, before it is scaled: [fp8_parts(rows), columns] as scratch, and [columns]. Made
  // together with codes, or alone where nothing is measured either; not while a tensor is only measured.
  float* partials = nullptr;
  float* column_sums = nullptr;  // null: not wanted
};

// Throws InvalidArgument for what does not go together. Casts begin with it.
void check_fp8_cast(const Fp8Cast& cast);

// Rows [begin, end), single-threaded; no two threads at once, because of what is noted. For sums, parts are
// whole (`begin` is a multiple of kFp8PartRows, `end` too or the last row), and the call that ends at the
// last row comes last, because it finishes them.
void fp8_cast_cpu(const Fp8Cast& cast, int64_t begin, int64_t end);

// transposed [columns, rows] of codes [rows, columns], for rows [begin, end) of `codes`.
void fp8_transpose_cpu(const uint8_t* codes, int64_t rows, int64_t columns, uint8_t* transposed,
                       int64_t begin, int64_t end);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Throws InvalidArgument for matrices to be transposed whose sides are no multiples of 16, for sums of
// columns whose number is no multiple of 8 (or of 4 with dropout; of three matrices the number of each one's
// columns), and for memory that does not begin at a multiple of 16 bytes.
void fp8_cast_cuda(const Fp8Cast& cast, Stream stream);
void fp8_transpose_cuda(const uint8_t* codes, int64_t rows, int64_t columns, uint8_t* transposed,
                        Stream stream);
// fp8_update of all tensors, of which histories has rule.history numbers each. Where `check` (may be null)
// says that the step is skipped, amax is forgotten and nothing else changes.
void fp8_update_cuda(Fp8Scale* tensors, uint32_t* histories, int64_t count, const Fp8Rule& rule,
                     const GradientCheck* check, Stream stream);

}  // namespace pacer::kernels
