// The CPU side of casts to 8-bit floats.
#include <pacer/kernels/fp8.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/kernels/cpu/fp8_rows.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

template <Fp8Format kFormat>
PACER_TARGET_CLONES void encode(const float* values, int64_t count, float scale, uint8_t* codes) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) codes[i] = to_fp8<kFormat>(mul_(values[i], scale));
}

PACER_TARGET_CLONES uint32_t amax_of(const float* values, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest;
}

PACER_TARGET_CLONES void add_to(float* sums, const float* values, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

template <class Element>
PACER_TARGET_CLONES void widen(const Element* x, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = load(x[i]);
}

// Elements from index `first` on, a multiple of 4 as is their number.
void drop_some(const Dropout& dropout, int64_t first, int64_t count, float* values) {
  for (int64_t i = 0; i < count; i += 4) {
    const PhiloxCounter draws = dropout_draws(dropout, (first + i) / 4);
    for (int64_t k = 0; k < 4; ++k) values[i + k] = drop(dropout, draws.word[k], values[i + k]);
  }
}

// lists[0] becomes the sum of `kLists` lists as a balanced tree of neighbours.
template <int64_t kLists>
void add_as_tree(float (*lists)[kFp8Strip], int64_t count) {
  for (int64_t distance = 1; distance < kLists; distance *= 2) {
    for (int64_t i = 0; i < kLists; i += 2 * distance) add_to(lists[i], lists[i + distance], count);
  }
}

// `count` elements of a row, from a column on, of the matrices that stand side by side.
template <class Element>
void widen_row(const Fp8Cast& cast, int64_t row, int64_t column, int64_t count, float* values) {
  if (cast.beside[0] == nullptr) {
    return widen(static_cast<const Element*>(cast.x) + row * cast.columns + column, count, values);
  }
  const void* const matrices[] = {cast.x, cast.beside[0], cast.beside[1]};
  const int64_t width = cast.columns / 3;
  for (int64_t done = 0; done < count;) {
    const int64_t in_matrix = (column + done) % width, some = std::min(count - done, width - in_matrix);
    const auto* x = static_cast<const Element*>(matrices[(column + done) / width]);
    widen(x + row * width + in_matrix, some, values + done);
    done += some;
  }
}

template <class Element>
void cast_rows(const Fp8Cast& cast, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  const bool measures = cast.to.codes == nullptr && cast.to.measured != nullptr;
  if (measures && is_superfluous(cast.to)) return;
  const Fp8Rows matrix{cast.rows, cast.columns, cast.to, cast.partials,
                       measures ? nullptr : cast.column_sums};
  for_fp8_rows(matrix, begin, end, [&](int64_t row, int64_t column, int64_t count, float* values) {
    widen_row<Element>(cast, row, column, count, values);
    if (cast.dropout.threshold != 0) drop_some(cast.dropout, row * cast.columns + column, count, values);
  });
}

}  // namespace

Fp8Strip::Fp8Strip(const Fp8Rows& matrix, float scale, int64_t column, int64_t count)
    : matrix_(matrix), scale_(scale), column_(column), count_(count) {
  if (matrix_.column_sums != nullptr) std::fill_n(fours_[0], kFours * kFp8Strip, 0.0f);
}

uint32_t Fp8Strip::add(int64_t row, const float* values) {
  const Fp8Target& to = matrix_.to;
  if (to.codes != nullptr) {
    uint8_t* codes = to.codes + row * matrix_.columns + column_;
    to.format == Fp8Format::e4m3 ? encode<Fp8Format::e4m3>(values, count_, scale_, codes)
                                 : encode<Fp8Format::e5m2>(values, count_, scale_, codes);
  }
  if (matrix_.column_sums != nullptr) add_to(fours_[row % kFp8PartRows / 4], values, count_);
  return amax_of(values, count_);
}

void Fp8Strip::finish(int64_t begin, int64_t end) {
  const Fp8Target& to = matrix_.to;
  if (to.codes != nullptr && to.transposed != nullptr) {
    for (int64_t column = column_; column < column_ + count_; ++column) {
      for (int64_t row = begin; row < end; ++row) {
        to.transposed[column * matrix_.rows + row] = to.codes[row * matrix_.columns + column];
      }
    }
  }
  if (matrix_.column_sums != nullptr) {
    add_as_tree<kFours>(fours_, count_);
    std::copy_n(fours_[0], count_, matrix_.partials + begin / kFp8PartRows * matrix_.columns + column_);
  }
}

void fp8_add_parts(const float* partials, int64_t parts, int64_t columns, float* sums) {
  for (int64_t column = 0; column < columns; column += kFp8Strip) {
    const int64_t count = std::min(kFp8Strip, columns - column);
    float strands[kFp8Strands][kFp8Strip] = {};
    for (int64_t part = 0; part < parts; ++part) {
      add_to(strands[part % kFp8Strands], partials + part * columns + column, count);
    }
    add_as_tree<kFp8Strands>(strands, count);
    std::copy_n(strands[0], count, sums + column);
  }
}

void check_fp8_cast(const Fp8Cast& cast) {
  const bool has_others = cast.beside[0] != nullptr;
  require(has_others == (cast.beside[1] != nullptr) && (!has_others || cast.columns % 3 == 0),
          "a cast of matrices side by side takes three of as many columns, not of ", cast.columns,
          " together");
  require(!has_others || cast.dropout.threshold == 0, "a cast of matrices side by side drops nothing");
  require(cast.dropout.threshold == 0 || cast.columns % 4 == 0,
          "a cast with dropout needs columns that are a multiple of 4, not ", cast.columns);
}

void fp8_cast_cpu(const Fp8Cast& cast, int64_t begin, int64_t end) {
  check_fp8_cast(cast);
  with_element(cast.type, [&](auto element) { cast_rows<decltype(element)>(cast, begin, end); });
}

void fp8_transpose_cpu(const uint8_t* codes, int64_t rows, int64_t columns, uint8_t* transposed,
                       int64_t begin, int64_t end) {
  constexpr int64_t kSide = 64;  // of a square that stays in the cache
  for (int64_t first = begin; first < end; first += kSide) {
    for (int64_t left = 0; left < columns; left += kSide) {
      for (int64_t column = left; column < std::min(columns, left + kSide); ++column) {
        for (int64_t row = first; row < std::min(end, first + kSide); ++row) {
          transposed[column * rows + row] = codes[row * columns + column];
        }
      }
    }
  }
}

}  // namespace pacer::kernels
