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

void add_narrow(const std::vector<AverageAndWeights>& pieces, double share) {
  for (size_t next = 0; next < pieces.size();) {
    const int64_t most = elements_at_once(pieces[next].average.device());
    std::vector<at::Tensor> averages, weights, wide;
    int64_t elements = 0;
    do {
      averages.push_back(pieces[next].average);
      weights.push_back(pieces[next].weights);
      wide.push_back(at::empty_like(averages.back()));
      elements += averages.back().numel();
      ++next;
    } while (next < pieces.size() && elements + pieces[next].average.numel() <= most);
    at::_foreach_copy_(wide, weights);
    at::_foreach_lerp_(averages, wide, share);
  }
}

}  // namespace

void add_to_averages(const std::vector<AverageAndWeights>& all, double share) {
  std::vector<at::Tensor> averages, weights;  // of one dtype, on one device
  std::vector<AverageAndWeights> narrow;
  for (const AverageAndWeights& one : all) {
    if (one.weights.device() != one.average.device()) {
      one.average.lerp_(one.weights.to(one.average.options()), share);
    } else if (one.weights.scalar_type() != one.average.scalar_type()) {
      add_pieces(one, narrow);
    } else {
      averages.push_back(one.average);
      weights.push_back(one.weights);
    }
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, weights, share);
  add_narrow(narrow, share);
}

}  // namespace pacer::detail
