#include <pacer/parallel/shard_layout.h>

#include <algorithm>

#include <pacer/core/tile.h>

namespace pacer {
namespace {

constexpr int64_t kAlignment = 128;  // elements, so that kernels may use wide accesses

}  // namespace

ShardLayout::ShardLayout(const std::vector<int64_t>& counts, int ranks, int64_t piece)
    : ranks_(ranks), counts_(counts) {
  const int64_t alignment = std::max(kAlignment, piece);
  // Bounds are multiples of a part, which is known last: with pieces, whatever crosses a multiple of a piece
  // begins at one, because a bound may be there.
  for (const int64_t count : counts) {
    const bool crosses = elements_ / alignment != (elements_ + count - 1) / alignment;
    if (piece > 1 && count > 0 && crosses) elements_ = round_up(elements_, alignment);
    begins_.push_back(elements_);
    elements_ += round_up(count, kAlignment);
  }
  elements_ = round_up(elements_, alignment * ranks);
}

std::vector<int64_t> ShardLayout::bounds(size_t tensor) const {
  std::vector<int64_t> bounds;
  for (int rank = 0; rank <= ranks_; ++rank) {
    const int64_t part_begin = rank * part_elements();
    bounds.push_back(std::clamp<int64_t>(part_begin - begins_[tensor], 0, counts_[tensor]));
  }
  return bounds;
}

}  // namespace pacer
