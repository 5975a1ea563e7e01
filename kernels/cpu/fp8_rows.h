// What every CPU loop that makes 8-bit floats does with its rows once they are computed, a strip of columns
// at a time: codes, their transpose, the largest magnitude, and sums of columns in the order of
// kernels/fp8.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pacer/kernels/cpu/note_amax.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/fp8.h>

namespace pacer::kernels {

// Columns of a strip: what a loop computes at once.
constexpr int64_t kFp8Strip = 256;

// What is made of a matrix.
struct Fp8Rows {
  int64_t rows, columns;
  const Fp8Target& to;
  float* partials;
  float* column_sums;  // null: not wanted
};

// Adds rows of one strip of one part, from top to bottom.
class Fp8Strip {
 public:
  // For columns [column, column + count), count <= kFp8Strip.
  Fp8Strip(const Fp8Rows& matrix, float scale, int64_t column, int64_t count);

  // values [count]; returns the bits of their largest magnitude.
  uint32_t add(int64_t row, const float* values);
  // After the last row, for rows [begin, end): the transpose and the partial sums.
  void finish(int64_t begin, int64_t end);

 private:
  static constexpr int64_t kFours = kFp8PartRows / 4;

  const Fp8Rows& matrix_;
  const float scale_;
  const int64_t column_, count_;
  float fours_[kFours][kFp8Strip];  // zero where sums are wanted
};

// Sums of columns from those of all parts.
void fp8_add_parts(const float* partials, int64_t parts, int64_t columns, float* sums);

// Makes it of rows [begin, end): compute(row, column, count, values) fills values [count].
template <class Compute>
void for_fp8_rows(const Fp8Rows& matrix, int64_t begin, int64_t end, const Compute& compute) {
  const Fp8Target& to = matrix.to;
  const bool superfluous = is_superfluous(to);
  const float scale = to.codes != nullptr ? fp8_scale(to) : 1.0f;
  uint32_t amax = 0;
  for (int64_t first = begin; first < end;) {
    const int64_t last = std::min(end, (first / kFp8PartRows + 1) * kFp8PartRows);
    for (int64_t column = 0; column < matrix.columns; column += kFp8Strip) {
      const int64_t count = std::min(kFp8Strip, matrix.columns - column);
      Fp8Strip strip(matrix, scale, column, count);
      float values[kFp8Strip];
      for (int64_t row = first; row < last; ++row) {
        compute(row, column, count, values);
        amax = std::max(amax, strip.add(row, values));
      }
      strip.finish(first, last);
    }
    first = last;
  }
  if (begin == end || matrix.columns == 0) {
    // Nothing was cast, so that there is nothing to note.
  } else if (to.codes != nullptr) {
    note_amax(to, amax, scale);
  } else if (to.measured != nullptr && !superfluous) {
    *to.measured = std::max(*to.measured, amax);
  }
  if (matrix.column_sums != nullptr && end == matrix.rows) {
    fp8_add_parts(matrix.partials, fp8_parts(matrix.rows), matrix.columns, matrix.column_sums);
  }
}

}  // namespace pacer::kernels
