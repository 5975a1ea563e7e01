// What stands between the product of queries, keys and values and their attention, in one pass: each head of
// queries and keys is normalised by the root of the mean square, where there is a weight (as in Qwen3), and
// rotated by its position (Su et al., "RoFormer", arXiv:2104.09864), where there are angles:
//
//   n = x / sqrt(mean of x^2 + epsilon) * weight
//   y_i = n_i cos_i - n_(i + d/2) sin_i        y_(i + d/2) = n_(i + d/2) cos_i + n_i sin_i        i < d/2
//
// Pairs are the channels i and i + d/2 of d, as in the weights of Llama and Qwen that are published for
// transformers. Everything is fp32 and rounded once. Backward turns gradients by the opposite angle, and puts
// those of queries, keys and values side by side, for the product behind it. The same bytes on CPU and GPU, apart
// from the bits of a NaN; sums have the order of kernels/math/rotary.h.
//
// Bytes an element, bf16: forward reads 2 and writes 2; backward the same, and reads 2 more with norms.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/rotary.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// The heads of one kind in rows of tokens, (rows, heads, head_dim). A row begins `stride` elements behind the one
// before it; its heads follow each other without gaps.
struct RotaryHeads {
  int64_t heads = 0;  // none: nothing of this kind is read or written
  const void* from = nullptr;
  int64_t from_stride = 0;
  void* to = nullptr;  // may be `from`, with the same stride
  int64_t to_stride = 0;
  const void* weight = nullptr;  // (head_dim), of the norm; null: none
};

// Heads of queries and keys, and what turns and normalises them. Pointers are to memory of the device that works.
struct RotaryForward {
  ElementType type = ElementType::f32;            // of heads
  ElementType parameter_type = ElementType::f32;  // of weights: `type` or fp32
  int64_t rows = 0, sequence = 1;                 // row r is at place r mod sequence of its sequence
  int64_t head_dim = 0;                           // even
  const float* cosines = nullptr;  // (sequence, head_dim / 2), of those places; null: not rotated
  const float* sines = nullptr;    // as cosines
  float epsilon = 1e-5f;
  RotaryHeads q, k;
};

// The same backward. `from` of q and k are gradients of what forward wrote, `to` those of what it read.
struct RotaryBackward : RotaryForward {
  // Copied.
  RotaryHeads v;
  const void *q_read = nullptr, *k_read = nullptr;  // what forward read, for those with a weight
  int64_t q_read_stride = 0, k_read_stride = 0;
  float* partials =
      nullptr;  // (2, rotary_parts(rows), head_dim), scratch, where there is a weight; else not used
  float *dq_weight = nullptr, *dk_weight = nullptr;  // (head_dim); null: not wanted
};

// Throw InvalidArgument for what cannot be. All functions below begin with them.
void check_rotary(const RotaryForward& work);
void check_rotary(const RotaryBackward& work);

// Rows [begin, end), single-threaded.
void rotary_cpu(const RotaryForward& work, int64_t begin, int64_t end);
// Parts [begin, end) of rotary_parts(rows), single-threaded: their rows, and partials.
void rotary_backward_cpu(const RotaryBackward& work, int64_t begin, int64_t end);
// After all parts, where a weight has a gradient.
void rotary_weights_cpu(const RotaryBackward& work);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// Throw InvalidArgument, too, for a head_dim that is no multiple of 16, for strides that are none of 8, and for
// memory that does not begin at a multiple of 16 bytes.
void rotary_cuda(const RotaryForward& work, Stream stream);
// Computes the gradients of weights, too.
void rotary_backward_cuda(const RotaryBackward& work, Stream stream);

}  // namespace pacer::kernels
