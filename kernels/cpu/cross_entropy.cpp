// The CPU side of the cross entropy: a row is widened to fp32 once, and stays in the core's own cache.
#include <pacer/kernels/cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/fp8.h>

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
  uint8_t* const codes = work.codes == nullptr ? nullptr : work.codes + r * work.columns;
  const int64_t target = work.targets[r];
  if (target == work.ignore_index) {
    work.losses[r] = 0;
    if (work.wants_gradient) std::fill_n(logits, work.columns, Element{});
    if (codes != nullptr) std::fill_n(codes, work.columns, uint8_t{0});
    return;
  }
  const float cap = work.soft_cap, weight = work.weights == nullptr ? 1.0f : work.weights[r];
  for (int64_t j = 0; j < work.columns; ++j) {
    const float logit = load(logits[j]);
    row[static_cast<size_t>(j)] = cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }
  const RowLoss of_row = loss_of(work, row, target);
  work.losses[r] = static_cast<float>(weight * of_row.loss);
  if (!work.wants_gradient) return;
  const auto lse = static_cast<float>(of_row.lse);
  const float of_lse = 1.0f + 2.0f * work.z_loss * lse;
  const float of_each = work.smoothing / static_cast<float>(work.columns);
  for (int64_t j = 0; j < work.columns; ++j) {
    const float x = row[static_cast<size_t>(j)], share = cap > 0 ? x / cap : 0.0f;
    const float of_others = of_lse * std::exp(x - lse) - of_each;
    const float of_x = j == target ? of_others - (1.0f - work.smoothing) : of_others;
    const float gradient = of_x * (1.0f - share * share);
    store(weight * gradient, logits[j]);
    if (codes != nullptr) codes[j] = to_fp8<Fp8Format::e5m2>(gradient * kCrossEntropyCodes);
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
