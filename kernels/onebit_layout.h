// How the tensors of a 1-bit exchange lie in one flat buffer, and how that is cut: each tensor begins at a
// multiple of 128 elements, ranks serve equal chunks, and work is done in rows. What lies between the tensors
// is padding: it is zero everywhere, and no norm or count sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <pacer/core/reduction_order.h>

namespace pacer::kernels {

constexpr int64_t kOneBitAlignment = 128;          // elements, of tensors and chunks
constexpr int64_t kOneBitRow = kReductionColumns;  // elements, of a row and of a scale block
constexpr int64_t kOneBitUnitRows = kReductionUnit / kOneBitRow;

// Consecutive real elements of one tensor inside one row.
struct OneBitPiece {
  uint32_t tensor;
  uint32_t count;
  int64_t offset;    // of the first element in its tensor
  int64_t position;  // of the first element in the range
};

// The real elements of a range of the buffer, row by row: those of row r are pieces[first[r]] ...
// pieces[first[r + 1] - 1], in order.
struct OneBitRows {
  int64_t extent = 0;  // elements of the range; the last row may be short
  std::vector<OneBitPiece> pieces;
  std::vector<int64_t> first;

  int64_t count() const { return static_cast<int64_t>(first.size()) - 1; }
  int64_t units() const { return (count() + kOneBitUnitRows - 1) / kOneBitUnitRows; }
  // The elements without padding, of all rows or of one.
  int64_t real_elements() const;
  int64_t real_elements(int64_t row) const;
};

class OneBitLayout {
 public:
  // Tensors of so many elements each. Chunks are multiples of `alignment`, itself a multiple of 128. Throws
  // InvalidArgument for sizes that cannot be.
  OneBitLayout(std::vector<int64_t> counts, int64_t world_size, int64_t alignment = kOneBitAlignment);

  const std::vector<int64_t>& counts() const { return counts_; }
  // Where a tensor begins in the buffer.
  int64_t offset(std::size_t tensor) const { return offsets_[tensor]; }
  // Elements of the buffer, padding included.
  int64_t length() const { return length_; }
  // Elements of a chunk; world_size chunks may reach beyond the buffer.
  int64_t chunk() const { return chunk_; }
  int64_t world_size() const { return world_size_; }

  // All of the buffer, and the part of it that rank k serves.
  OneBitRows rows() const { return rows(0, length_); }
  OneBitRows served_rows(int64_t rank) const;
  // The tensor to which each kOneBitAlignment elements of the buffer belong.
  std::vector<uint32_t> tensors() const;
  // Where each tensor's elements end in the buffer.
  std::vector<int64_t> ends() const;
  // The elements of one tensor that rank k serves, in the tensor's own numbering; none where begin == end.
  struct Part {
    int64_t begin;
    int64_t end;
  };
  // The elements of the tensor that the rank serves.
  Part served_part(std::size_t tensor, int64_t rank) const;

 private:
  OneBitRows rows(int64_t begin, int64_t end) const;

  std::vector<int64_t> counts_;
  std::vector<int64_t> offsets_;
  int64_t world_size_;
  int64_t length_ = 0;
  int64_t chunk_ = 0;
};

}  // namespace pacer::kernels
