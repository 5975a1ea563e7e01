// The CPU side of the cross entropy: a row is widened to fp32 once, and stays in the core's own cache.
#include <pacer/kernels/cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

struct RowLoss {
  double lse, loss;
};

RowLoss loss_of(const CrossEntropy& work, const std::vector<float>& row, int64_t target) {
  float largest = -std::numeric_limits<float>::infinity();
  double sum = 0, of_all = 0;
  for (const float x : row) largest = std::max(largest, x);
  for (const float x : row) sum += std::exp(x - largest);
  const double lse = largest + std::log(sum);
  double loss = lse - (1.0 - work.smoothing) * row[static_cast<size_t>(target)];
  if (work.smoothing != 0) {
    for (const float x : row) of_all += x;
    loss -= work.smoothing * of_all / static_cast<double>(work.columns);
  }
  return {lse, loss + work.z_loss * lse * lse};
}

template <class Element>
void cross_entropy_row(const CrossEntropy& work, int64_t r, std::vector<float>& row) {
  Element* const logits = static_cast<Element*>(work.logits) + r * work.columns;
  const int64_t target = work.targets[r];
  if (target == work.ignore_index) {
    work.losses[r] = 0;
    if (work.wants_gradient) std::fill_n(logits, work.columns, Element{});
    return;
  }
  for (int64_t j = 0; j < work.columns; ++j) row[static_cast<size_t>(j)] = load(logits[j]);
  const RowLoss of_row = loss_of(work, row, target);
  work.losses[r] = static_cast<float>(of_row.loss);
  if (!work.wants_gradient) return;
  const auto lse = static_cast<float>(of_row.lse);
  const float weight = 1.0f + 2.0f * work.z_loss * lse;
  const float of_each = work.smoothing / static_cast<float>(work.columns);
  for (int64_t j = 0; j < work.columns; ++j) {
    const float gradient = weight * std::exp(row[static_cast<size_t>(j)] - lse) - of_each;
    store(j == target ? gradient - (1.0f - work.smoothing) : gradient, logits[j]);
  }
}

}  // namespace

void cross_entropy_cpu(const CrossEntropy& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  std::vector<float> row(static_cast<size_t>(work.columns));
  with_element(work.type, [&](auto element) {
    for (int64_t r = begin; r < end; ++r) cross_entropy_row<decltype(element)>(work, r, row);
  });
}

}  // namespace pacer::kernels
