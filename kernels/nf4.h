// NF4 over whole tensors (kernels/math/nf4.h has the rule): quantising and decoding, the same bytes on CPU
// and GPU. Blocks are runs of 64 elements in memory order, whatever the tensor's shape; the last one may be
// shorter.
//
// bf16, bytes an element: quantising reads 2 and writes 0.5 and a 64th of a scale (4 bytes, or 1 with double
// quantisation); decoding reads those and writes 2.
#pragma once

#include <array>
#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/nf4.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// The number of scales of `count` elements, one for each block of 64; the number of scales of those scales;
// and the bytes of the codes.
PACER_HOST_DEVICE int64_t nf4_blocks(int64_t count) { return ceil_divide(count, kNf4Block); }
PACER_HOST_DEVICE int64_t nf4_nested_blocks(int64_t count) {
  return ceil_divide(nf4_blocks(count), kNf4NestedBlock);
}
PACER_HOST_DEVICE int64_t nf4_bytes(int64_t count) { return ceil_divide(count, 2); }

// The signed dynamic map of 8 bits, 256 values that grow from -0.993 to 1 (Dettmers et al., "8-bit Optimizers
// via Block-wise Quantization", arXiv:2110.02861): seven decades of either sign, of 1, 2, 4 ... 64 values
// each, 0 and 1. In the bits of bitsandbytes on a processor with fused multiply-add.
const std::array<float, 256>& nf4_nested_map();

// `count` elements in 4 bits. With double quantisation `absmax` is null and the other pointers are set, else
// it is the other way round.
struct Nf4Codes {
  // [nf4_bytes(count)]: element 2i in the upper half of byte i, element 2i + 1 in the lower; 7 where there is
  // no such element.
  uint8_t* codes = nullptr;
  float* absmax = nullptr;            // [nf4_blocks(count)]
  uint8_t* absmax_codes = nullptr;    // [nf4_blocks(count)]
  float* nested_absmax = nullptr;     // [nf4_nested_blocks(count)]
  const float* nested_map = nullptr;  // [256], growing, in the same memory as the rest
  float* offset = nullptr;            // [1], the mean of the scales
  int64_t count = 0;
};

// Each throws InvalidArgument: where pointers are missing or both kinds of scales are there, where quantising
// with double quantisation has no scratch, and for rows of no columns or that overlap. The functions below
// begin with them.
void check_nf4(const Nf4Codes& codes);
void check_nf4_scratch(const Nf4Codes& to, const float* scratch);
void check_nf4_rows(const Nf4Codes& codes, int64_t columns, int64_t stride);

// Quantises x [count]. `scratch` is fp32 [nf4_blocks(count)] with double quantisation, else unused. What is
// not finite is the caller's to refuse: the scale of such a block becomes infinity or NaN and its codes 7, so
// that all of it (with double quantisation, everything) decodes to NaN.
//
// The mean of the scales has one order of additions:
//   block   256 neighbouring scales, missing ones 0, in fp64: acc[i] += acc[i + h] for h = 128, 64 ... 1;
//           acc[0] / 256 is rounded to fp32
//   mean    those of all blocks in the order of sum_partials (core/reduction_order.h), times 256, divided by
//           the number of scales, rounded to fp32; 0 where there are none
void nf4_quantize_cpu(const void* x, ElementType type, const Nf4Codes& to, float* scratch);

// The same in parts, for callers with threads; each is single-threaded. First the codes of blocks of 64
// [begin, end), and their scales, in to.absmax or `scratch`; these of all blocks before what follows. With
// double quantisation then the offset, from the scales of all blocks, and at last the codes of scales of
// nested blocks [begin, end).
void nf4_quantize_cpu(const void* x, ElementType type, const Nf4Codes& to, float* scratch, int64_t begin,
                      int64_t end);
void nf4_offset_cpu(const float* scratch, const Nf4Codes& to);
void nf4_quantize_scales_cpu(const float* scratch, const Nf4Codes& to, int64_t begin, int64_t end);

// Decodes blocks of 64 [begin, end), single-threaded: book * scale in fp32, rounded once to `type`. Element i
// goes to out[i / columns * stride + i % columns]; what lies between rows stays as it is. Dense if
// stride == columns.
void nf4_decode_cpu(const Nf4Codes& from, ElementType type, void* out, int64_t columns, int64_t stride,
                    int64_t begin, int64_t end);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----
// Both throw InvalidArgument for codes, x or out that do not begin at a multiple of 16 bytes.

// Quantises all elements of `x`, scales included.
void nf4_quantize_cuda(const void* x, ElementType type, const Nf4Codes& to, float* scratch, Stream stream);
// Decodes all blocks, as nf4_decode_cpu does.
void nf4_decode_cuda(const Nf4Codes& from, ElementType type, void* out, int64_t columns, int64_t stride,
                     Stream stream);

}  // namespace pacer::kernels
