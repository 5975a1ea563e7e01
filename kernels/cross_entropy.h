// The cross entropy of rows of logits against one target each, and its gradient in their place, so that a loss needs no
// memory for either beside the logits themselves. In fp32 inside, whatever the logits are.
//
//   lse  = log(sum_j exp(x_j))
//   loss = lse - (1 - smoothing) x_target - smoothing * mean_j(x_j) + z_loss * lse^2
//   gradient_j = softmax_j (1 + 2 z_loss lse) - (1 - smoothing) [j = target] - smoothing / columns
//
// With a soft cap x is cap tanh(logit / cap) (Gemma 2, arXiv:2408.00118), and the gradient of the logit (1 - (x / cap)^2) as
// large. A row's weight multiplies its loss and gradient.
//
// A row may also lie in several places, with some of its columns in each, as where ranks share a head. Each place then makes
// its terms of the sums (`terms`), and once lse is known from those of all, the gradients of its columns (`lse`).
//
// Smoothing is that of Szegedy et al. (arXiv:1512.00567), z_loss that of PaLM (arXiv:2204.02311). Errors are those of sums in
// fp32, on a GPU of exponentials with a relative error of 2^-21, too; CPU and GPU do not have the same bits.
// bf16: reads 2 bytes an element, and with the gradient again 2 and writes 2, and 1 for codes.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

struct CrossEntropy {
  ElementType type = ElementType::f32;  // of the logits
  int64_t rows = 0, columns = 0;
  void* logits = nullptr;            // (rows, columns), row by row without gaps
  const int64_t* targets = nullptr;  // (rows)
  int64_t ignore_index = -100;       // a row with this target has a loss and a gradient of 0
  float smoothing = 0, z_loss = 0;
  float soft_cap = 0;              // 0: none
  const float* weights = nullptr;  // (rows); null: ones
  bool wants_gradient = false;     // in the place of the logits
  float* losses = nullptr;         // (rows)
  // Null, or where the gradient goes in e5m2, too, (rows, columns): before the row's weight, times kCrossEntropyCodes. It is cast
  // from fp32.
  uint8_t* codes = nullptr;

  // Columns from first_column on of `all_columns` are here, and targets count from the first of all; 0: all are here.
  int64_t first_column = 0, all_columns = 0;
  // (rows, 4): only the largest x here, sum(exp(x - largest)), x_target, or 0 where it is not here, and sum(x) are made; of no
  // columns -inf and zeros. Null: the loss.
  float* terms = nullptr;
  // (rows): only gradients are made, from this lse, and no losses. Null: lse is found here.
  const float* lse = nullptr;
};
// A gradient is at most 1 beside what z_loss adds. So e5m2 reaches from 2^-24 to 224, past all probabilities that matter.
constexpr float kCrossEntropyCodes = 0x1p8f;

// Rows [begin, end), single-threaded. Targets are from 0 to columns - 1, or ignored.
void cross_entropy_cpu(const CrossEntropy& work, int64_t begin, int64_t end);

// Every pointer is device memory, work is enqueued on `stream`, nothing synchronises. A row whose target is none has a loss
// and a gradient of NaN.
void cross_entropy_cuda(const CrossEntropy& work, Stream stream);

}  // namespace pacer::kernels
