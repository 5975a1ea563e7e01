#include <pacer/kernels/onebit_layout.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>

namespace pacer::kernels {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 60;  // so that no sum or multiple below can overflow

}  // namespace

int64_t OneBitRows::real_elements() const {
  int64_t sum = 0;
  for (const OneBitPiece& piece : pieces) sum += piece.count;
  return sum;
}

int64_t OneBitRows::real_elements(int64_t row) const {
  int64_t sum = 0;
  for (int64_t i = first[static_cast<size_t>(row)]; i < first[static_cast<size_t>(row) + 1]; ++i) {
    sum += pieces[static_cast<size_t>(i)].count;
  }
  return sum;
}

OneBitLayout::OneBitLayout(std::vector<int64_t> counts, int64_t world_size, int64_t alignment)
    : counts_(std::move(counts)), world_size_(world_size) {
  require(world_size >= 1, "a 1-bit exchange needs at least 1 rank, not ", world_size);
  require(alignment >= kOneBitAlignment && alignment % kOneBitAlignment == 0,
          "the alignment of a 1-bit exchange must be a multiple of ", kOneBitAlignment, " elements, not ",
          alignment);
  require(alignment <= kMostElements / world_size, "the alignment of a 1-bit exchange over ", world_size,
          " ranks must be at most 2^60 / ", world_size, " elements, not ", alignment);
  for (const int64_t count : counts_) {
    require(count >= 0, "a tensor of a 1-bit exchange cannot have ", count, " elements");
    require(count <= kMostElements - length_, "the tensors of a 1-bit exchange have more than 2^60 elements");
    offsets_.push_back(length_);
    length_ += round_up(count, kOneBitAlignment);
  }
  chunk_ = alignment * ceil_divide(length_, alignment * world_size);
}

OneBitRows OneBitLayout::served_rows(int64_t rank) const {
  return rows(std::min(length_, rank * chunk_), std::min(length_, (rank + 1) * chunk_));
}

std::vector<uint32_t> OneBitLayout::tensors() const {
  std::vector<uint32_t> tensors;
  tensors.reserve(static_cast<size_t>(length_ / kOneBitAlignment));
  for (size_t i = 0; i < counts_.size(); ++i) {
    tensors.resize(tensors.size() + static_cast<size_t>(ceil_divide(counts_[i], kOneBitAlignment)),
                   static_cast<uint32_t>(i));
  }
  return tensors;
}

std::vector<int64_t> OneBitLayout::ends() const {
  std::vector<int64_t> ends;
  for (size_t i = 0; i < counts_.size(); ++i) ends.push_back(offsets_[i] + counts_[i]);
  return ends;
}

OneBitLayout::Part OneBitLayout::served_part(std::size_t tensor, int64_t rank) const {
  const int64_t base = rank * chunk_ - offsets_[tensor];  // where the chunk begins, seen from the tensor
  const int64_t end = std::clamp<int64_t>(base + chunk_, 0, counts_[tensor]);
  return {std::clamp<int64_t>(base, 0, end), end};
}

OneBitRows OneBitLayout::rows(int64_t begin, int64_t end) const {
  OneBitRows rows;
  rows.extent = end - begin;
  const int64_t count = ceil_divide(rows.extent, kOneBitRow);
  rows.first.assign(1, 0);
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
  size_t tensor = after == offsets_.begin() ? 0 : static_cast<size_t>(after - offsets_.begin()) - 1;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t row_begin = begin + row * kOneBitRow, row_end = std::min(end, row_begin + kOneBitRow);
    while (tensor < counts_.size() && offsets_[tensor] + counts_[tensor] <= row_begin) ++tensor;
    for (size_t t = tensor; t < counts_.size() && offsets_[t] < row_end; ++t) {
      const int64_t from = std::max(row_begin, offsets_[t]);
      const int64_t to = std::min(row_end, offsets_[t] + counts_[t]);
      if (from >= to) continue;
      rows.pieces.push_back(
          {static_cast<uint32_t>(t), static_cast<uint32_t>(to - from), from - offsets_[t], from - begin});
    }
    rows.first.push_back(static_cast<int64_t>(rows.pieces.size()));
  }
  return rows;
}

}  // namespace pacer::kernels
