// Casts to 8-bit floats: q = x * scale, saturated and rounded to nearest even (kernels/math/fp8.h), with the
// largest magnitude of x on the way, and with the transpose that matrix products of 8-bit floats need. The
// same bytes on CPU and GPU.
//
// bf16: cast reads 2 and writes 1 byte an element, cast_transpose writes 2.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// What is cast.
enum class Fp8Source : uint32_t { f32, bf16, f16 };

// A matrix in memory without gaps, row by row, and where its codes go: those of the matrix, and where it is
// not null of its transpose, [columns][rows].
struct Fp8Cast {
  Fp8Source source = Fp8Source::f32;
  const void* x = nullptr;
  int64_t rows = 0, columns = 0;
  Fp8Format format = Fp8Format::e4m3;
  const float* scale = nullptr;
  uint8_t* codes = nullptr;  // null: only amax is wanted
  uint8_t* transposed = nullptr;
  uint32_t* amax = nullptr;  // becomes the largest of what it was and the magnitudes of x, as bits
};

// Rows [begin, end), single-threaded.
void fp8_cast_cpu(const Fp8Cast& cast, int64_t begin, int64_t end);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Throws InvalidArgument for matrices to be transposed whose sides are no multiples of 16, and for memory
// that does not begin at a multiple of 16 bytes.
void fp8_cast_cuda(const Fp8Cast& cast, Stream stream);
// fp8_update of all tensors, of which histories has rule.history numbers each. Where `check` (may be null)
// says that the step is skipped, amax is forgotten and nothing else changes.
void fp8_update_cuda(Fp8Scale* tensors, uint32_t* histories, int64_t count, const Fp8Rule& rule,
                     const GradientCheck* check, Stream stream);

}  // namespace pacer::kernels
