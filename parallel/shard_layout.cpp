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

ShardPiece ShardLayout::piece(size_t tensor, int rank) const {
  const int64_t part = part_elements(), part_begin = rank * part;
  const int64_t begin = std::max(begins_[tensor], part_begin);
  const int64_t end = std::min(begins_[tensor] + counts_[tensor], part_begin + part);
  if (begin >= end) return {};
  return {begin - begins_[tensor], end - begin, begin - part_begin};
}

}  // namespace pacer
