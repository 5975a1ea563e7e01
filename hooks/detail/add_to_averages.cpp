#include <pacer/hooks/detail/add_to_averages.h>

#include <algorithm>

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/empty_like.h>

namespace pacer::detail {
namespace {

// 16-bit weights that are made fp32 at once: they stay in the cache.
int64_t elements_at_once(at::Device device) {
  constexpr int64_t kOnGpu = int64_t{8} << 20, kOnCpu = int64_t{1} << 17;
  return device.is_cpu() ? kOnCpu : kOnGpu;
}

void add_pieces(const AverageAndWeights& whole, std::vector<AverageAndWeights>& pieces) {
  const int64_t most = elements_at_once(whole.average.device()), all = whole.average.numel();
  if (all <= most || !whole.average.is_contiguous() || !whole.weights.is_contiguous()) {
    pieces.push_back(whole);
    return;
  }
  const at::Tensor average = whole.average.view({-1}), weights = whole.weights.view({-1});
  for (int64_t first = 0; first < all; first += most) {
    const int64_t count = std::min(most, all - first);
    pieces.push_back({average.narrow(0, first, count), weights.narrow(0, first, count)});
  }
}

// So many of the pieces from `first` on as are made fp32 at once.
size_t count_at_once(const std::vector<AverageAndWeights>& pieces, size_t first) {
  const int64_t most = elements_at_once(pieces[first].average.device());
  int64_t elements = 0;
  size_t end = first;
  for (; end < pieces.size(); ++end) {
    elements += pieces[end].average.numel();
    if (end > first && elements > most) break;
  }
  return end - first;
}

// Takes them all, or none where memory is short.
void add_together(const std::vector<AverageAndWeights>& pieces, size_t first, size_t count, double share) {
  std::vector<at::Tensor> averages, weights, wide;
  for (size_t i = first; i < first + count; ++i) {
    averages.push_back(pieces[i].average);
    weights.push_back(pieces[i].weights);
  }
  const bool are_narrow = weights.front().scalar_type() != averages.front().scalar_type();
  if (are_narrow) {
    for (const at::Tensor& average : averages) wide.push_back(at::empty_like(average));
    at::_foreach_copy_(wide, weights);
  }
  at::_foreach_lerp_(averages, are_narrow ? wide : weights, share);
}

}  // namespace

void add_to_averages(const std::vector<AverageAndWeights>& all, double share, size_t* done) {
  std::vector<AverageAndWeights> alike, pieces;  // in one dtype, and in two
  for (const AverageAndWeights& one : all) {
    if (one.weights.scalar_type() != one.average.scalar_type()) {
      add_pieces(one, pieces);
    } else {
      alike.push_back(one);
    }
  }
  const size_t count_alike = alike.size();
  pieces.insert(pieces.begin(), alike.begin(), alike.end());
  while (*done < pieces.size()) {
    const AverageAndWeights& next = pieces[*done];
    size_t count = 1;
    if (next.weights.device() != next.average.device()) {
      next.average.lerp_(next.weights.to(next.average.options()), share);
    } else {
      // On a CPU these functions go through tensors one by one, and may throw in the middle.
      if (!next.average.is_cpu())
        count = *done < count_alike ? count_alike - *done : count_at_once(pieces, *done);
      add_together(pieces, *done, count, share);
    }
    *done += count;
  }
}

}  // namespace pacer::detail
