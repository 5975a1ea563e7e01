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

struct RowSums {
  float largest = -std::numeric_limits<float>::infinity();
  double sum = 0;     // of exp(x - largest)
  double of_all = 0;  // of x
  double lse() const { return largest + std::log(sum); }
};

RowSums sums_of(const std::vector<float>& row) {
  RowSums sums;
  for (const float x : row) sums.largest = std::max(sums.largest, x);
  for (const float x : row) {
    sums.sum += std::exp(x - sums.largest);
    sums.of_all += x;
  }
  return sums;
}

double loss_of(const CrossEntropy& work, const RowSums& sums, float of_target) {
  const double lse = sums.lse();
  double loss = lse - (1.0 - work.smoothing) * of_target;
  if (work.smoothing != 0) loss -= work.smoothing * sums.of_all / static_cast<double>(work.columns);
  return loss + work.z_loss * lse * lse;
}

void write_terms(const RowSums& sums, float of_target, float* terms) {
  terms[0] = sums.largest;
  terms[1] = static_cast<float>(sums.sum);
  terms[2] = of_target;
  terms[3] = static_cast<float>(sums.of_all);
}

// A row, widened to fp32 as `row`.
template <class Element>
class RowWork {
 public:
  RowWork(const CrossEntropy& work, int64_t r, std::vector<float>& row)
      : work_(work),
        r_(r),
        row_(row),
        logits_(static_cast<Element*>(work.logits) + r * work.columns),
        codes_(work.codes == nullptr ? nullptr : work.codes + r * work.columns),
        target_(work.targets[r] - work.first_column) {}

  void run() {
    if (work_.targets[r_] == work_.ignore_index) return ignore();
    for (int64_t j = 0; j < work_.columns; ++j) row_[static_cast<size_t>(j)] = capped(load(logits_[j]));
    const bool is_here = target_ >= 0 && target_ < work_.columns;
    const float of_target = is_here ? row_[static_cast<size_t>(target_)] : 0.0f;
    if (work_.terms != nullptr) return write_terms(sums_of(row_), of_target, work_.terms + 4 * r_);
    if (work_.lse != nullptr) return write_gradient(work_.lse[r_]);
    const RowSums sums = sums_of(row_);
    work_.losses[r_] = static_cast<float>(weight() * loss_of(work_, sums, of_target));
    if (work_.wants_gradient) write_gradient(static_cast<float>(sums.lse()));
  }

 private:
  float weight() const { return work_.weights == nullptr ? 1.0f : work_.weights[r_]; }
  float capped(float logit) const {
    const float cap = work_.soft_cap;
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }

  void ignore() {
    if (work_.terms != nullptr) return write_terms({}, 0, work_.terms + 4 * r_);
    if (work_.lse == nullptr) work_.losses[r_] = 0;
    if (!work_.wants_gradient) return;
    std::fill_n(logits_, work_.columns, Element{});
    if (codes_ != nullptr) std::fill_n(codes_, work_.columns, uint8_t{0});
  }

  void write_gradient(float lse) {
    const int64_t all_columns = work_.all_columns > 0 ? work_.all_columns : work_.columns;
    const float of_lse = 1.0f + 2.0f * work_.z_loss * lse;
    const float of_each = work_.smoothing / static_cast<float>(all_columns);
    for (int64_t j = 0; j < work_.columns; ++j) {
      const float x = row_[static_cast<size_t>(j)], share = work_.soft_cap > 0 ? x / work_.soft_cap : 0.0f;
      const float of_others = of_lse * std::exp(x - lse) - of_each;
      const float of_x = j == target_ ? of_others - (1.0f - work_.smoothing) : of_others;
      const float gradient = of_x * (1.0f - share * share);
      store(weight() * gradient, logits_[j]);
      if (codes_ != nullptr) codes_[j] = to_fp8<Fp8Format::e5m2>(gradient * kCrossEntropyCodes);
    }
  }

  const CrossEntropy& work_;
  const int64_t r_;
  std::vector<float>& row_;
  Element* const logits_;
  uint8_t* const codes_;
  const int64_t target_;  // among the columns here, if it is
};

}  // namespace

void cross_entropy_cpu(const CrossEntropy& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  std::vector<float> row(static_cast<size_t>(work.columns));
  with_element(work.type, [&](auto element) {
    for (int64_t r = begin; r < end; ++r) RowWork<decltype(element)>(work, r, row).run();
  });
}

}  // namespace pacer::kernels
