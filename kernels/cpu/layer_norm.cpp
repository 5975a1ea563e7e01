// The CPU side of layer normalisation.
#include <pacer/kernels/layer_norm.h>

#include <algorithm>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/kernels/cpu/sum_parts.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/fp8.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

// Accumulators of a row, in the order of kernels/math/layer_norm.h.
class RowSum {
 public:
  explicit RowSum(int64_t columns)
      : lanes_(layer_norm_lanes(columns)), accumulators_(static_cast<size_t>(lanes_) * kLayerNormPiece) {}

  float* accumulators() { return accumulators_.data(); }
  int64_t width() const { return static_cast<int64_t>(accumulators_.size()); }

  // The sum; the accumulators are zero afterwards.
  float take() {
    float lanes[kLayerNormMostLanes], warps[kLayerNormMostLanes / kLayerNormWarp];
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      float eight[kLayerNormPiece];
      std::copy_n(accumulators_.data() + lane * kLayerNormPiece, kLayerNormPiece, eight);
      lanes[lane] = sum_of_eight(eight);
    }
    std::fill(accumulators_.begin(), accumulators_.end(), 0.0f);
    const int count = lanes_ / kLayerNormWarp;
    for (int64_t warp = 0; warp < count; ++warp)
      warps[warp] = fold(lanes + warp * kLayerNormWarp, kLayerNormWarp);
    return fold(warps, count);
  }

 private:
  int lanes_;
  std::vector<float> accumulators_;
};

PACER_TARGET_CLONES void add_values(const float* s, int64_t columns, RowSum& sum) {
  float* to = sum.accumulators();
  for (int64_t first = 0; first < columns; first += sum.width()) {
    const int64_t count = std::min(sum.width(), columns - first);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] += s[first + i];
  }
}

PACER_TARGET_CLONES void add_squared_deviations(const float* s, int64_t columns, float mean, RowSum& sum) {
  float* to = sum.accumulators();
  for (int64_t first = 0; first < columns; first += sum.width()) {
    const int64_t count = std::min(sum.width(), columns - first);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float deviation = s[first + i] - mean;
      to[i] = fma_(deviation, deviation, to[i]);
    }
  }
}

template <class Element>
PACER_TARGET_CLONES void load_row(const Element* memory, int64_t columns, float* values) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) values[j] = load(memory[j]);
}

template <class Element>
PACER_TARGET_CLONES void add_row(const Element* memory, int64_t columns, float* values) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) values[j] += load(memory[j]);
}

// Rounds to what the stream's memory holds. `x` may be null.
template <class Stream>
PACER_TARGET_CLONES void add_rounded(const Stream* x, const float* branch, int64_t columns, float* s) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) {
    Stream rounded;
    store((x == nullptr ? 0.0f : load(x[j])) + branch[j], rounded);
    s[j] = load(rounded);
  }
}

template <class Element>
PACER_TARGET_CLONES void store_row(const float* values, int64_t columns, Element* memory) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) store(values[j], memory[j]);
}

void drop_row(const Dropout& dropout, int64_t first, int64_t columns, float* values) {
  for (int64_t j = 0; j < columns; j += 4) {
    const PhiloxCounter draws = dropout_draws(dropout, (first + j) / 4);
    for (int k = 0; k < 4; ++k) values[j + k] = drop(dropout, draws.word[k], values[j + k]);
  }
}

template <class Parameter, class Element>
PACER_TARGET_CLONES void normalize_row(const float* s, int64_t columns, float mean, float rstd,
                                       const Parameter* weight, const Parameter* bias, Element* y) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) {
    store(fma_(normalized(s[j], mean, rstd), load(weight[j]), bias == nullptr ? 0.0f : load(bias[j])), y[j]);
  }
}

template <class Element>
const Element* row_of(const void* memory, int64_t first) {
  return static_cast<const Element*>(memory) + first;
}
template <class Element>
Element* row_of(void* memory, int64_t first) {
  return static_cast<Element*>(memory) + first;
}

template <Normalization kNormalization, class StreamElement, class BranchElement, class Parameter>
void forward_rows(const LayerNormForward& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  if (is_superfluous(work)) return;
  const int64_t columns = work.columns;
  std::vector<float> s(static_cast<size_t>(columns)), branch(work.branch == nullptr ? 0 : s.size());
  std::vector<BranchElement> own_y(work.y == nullptr ? s.size() : 0);
  RowSum row_sum(columns);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * columns;
    const auto* x = work.x == nullptr ? nullptr : row_of<StreamElement>(work.x, first);
    if (work.branch == nullptr) {
      load_row(x, columns, s.data());
    } else {
      load_row(row_of<BranchElement>(work.branch, first), columns, branch.data());
      if (work.branch_bias != nullptr) {
        add_row(static_cast<const BranchElement*>(work.branch_bias), columns, branch.data());
      }
      if (work.dropout.threshold != 0) drop_row(work.dropout, first, columns, branch.data());
      add_rounded(x, branch.data(), columns, s.data());
      if (work.sum != nullptr) store_row(s.data(), columns, row_of<StreamElement>(work.sum, first));
    }
    if (work.weight == nullptr) continue;

    float mean = 0;
    if constexpr (kNormalization == Normalization::layer) {
      add_values(s.data(), columns, row_sum);
      mean = div_(row_sum.take(), static_cast<float>(columns));
    }
    add_squared_deviations(s.data(), columns, mean, row_sum);
    const float rstd = rstd_of(row_sum.take(), static_cast<float>(columns), work.epsilon);
    if (work.mean != nullptr) work.mean[row] = mean;
    if (work.rstd != nullptr) work.rstd[row] = rstd;

    BranchElement* y = work.y == nullptr ? own_y.data() : row_of<BranchElement>(work.y, first);
    normalize_row(s.data(), columns, mean, rstd, static_cast<const Parameter*>(work.weight),
                  static_cast<const Parameter*>(work.bias), y);
    if (work.to.codes == nullptr && work.to.measured == nullptr) continue;
    Fp8Cast cast;
    cast.type = work.branch_type, cast.x = y, cast.to = work.to;
    cast.rows = 1, cast.columns = columns;
    if (work.to.codes != nullptr) cast.to.codes += first;
    fp8_cast_cpu(cast, 0, 1);
  }
}

template <Normalization kNormalization, class StreamElement, class Gradient, class Parameter>
PACER_TARGET_CLONES void add_products(const StreamElement* s, const Gradient* dy, const Parameter* weight,
                                      int64_t columns, float mean, float rstd, RowSum& gradients,
                                      RowSum& products) {
  float *to_gradients = gradients.accumulators(), *to_products = products.accumulators();
  for (int64_t first = 0; first < columns; first += gradients.width()) {
    const int64_t count = std::min(gradients.width(), columns - first);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = first + i;
      const float dy_weight = mul_(load(dy[j]), load(weight[j]));
      if constexpr (kNormalization == Normalization::layer) to_gradients[i] += dy_weight;
      to_products[i] = fma_(dy_weight, normalized(load(s[j]), mean, rstd), to_products[i]);
    }
  }
}

struct RowMeans {
  float gradient, product;
};

// `dsum` may be null, and may be `dx`.
template <class StreamElement, class Gradient, class Parameter>
PACER_TARGET_CLONES void write_gradient(const StreamElement* s, const Gradient* dy, const Parameter* weight,
                                        int64_t columns, float mean, float rstd, RowMeans means,
                                        const StreamElement* dsum, StreamElement* dx) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) {
    const float dy_weight = mul_(load(dy[j]), load(weight[j])),
                to_add = dsum == nullptr ? 0.0f : load(dsum[j]);
    store(layer_norm_gradient(dy_weight, normalized(load(s[j]), mean, rstd), rstd, means.gradient,
                              means.product, to_add),
          dx[j]);
  }
}

template <Normalization kNormalization, class StreamElement, class Gradient>
PACER_TARGET_CLONES void add_to_partials(const StreamElement* s, const Gradient* dy, int64_t columns,
                                         float mean, float rstd, float* dweight, float* dbias) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) {
    dweight[j] = fma_(load(dy[j]), normalized(load(s[j]), mean, rstd), dweight[j]);
    if constexpr (kNormalization == Normalization::layer) dbias[j] += load(dy[j]);
  }
}

template <Normalization kNormalization, class StreamElement, class Gradient, class Parameter>
void backward_parts(const LayerNormBackward& work, int64_t begin, int64_t end) {
  constexpr bool kHasMean = kNormalization == Normalization::layer;
  const FullDenormals full_denormals;
  const int64_t columns = work.columns, part_rows = layer_norm_part_rows(work.rows, columns),
                parts = layer_norm_parts(work.rows, columns);
  const auto* weight = static_cast<const Parameter*>(work.weight);
  RowSum gradients(columns), products(columns);
  for (int64_t part = begin; part < end; ++part) {
    const bool is_summed = work.partials != nullptr;
    float* dweight = is_summed ? work.partials + part * columns : nullptr;
    float* dbias = is_summed && kHasMean ? dweight + parts * columns : nullptr;
    for (float* sums : {dweight, dbias}) std::fill_n(sums, sums != nullptr ? columns : 0, 0.0f);
    const int64_t last = std::min(work.rows, (part + 1) * part_rows);
    for (int64_t row = part * part_rows; row < last; ++row) {
      const int64_t first = row * columns;
      const auto* s = row_of<StreamElement>(work.s, first);
      const auto* dy = row_of<Gradient>(work.dy, first);
      const auto* dsum = work.dsum == nullptr ? nullptr : row_of<StreamElement>(work.dsum, first);
      const float mean = kHasMean ? work.mean[row] : 0.0f, rstd = work.rstd[row];
      if (is_summed) add_to_partials<kNormalization>(s, dy, columns, mean, rstd, dweight, dbias);
      add_products<kNormalization>(s, dy, weight, columns, mean, rstd, gradients, products);
      const auto count = static_cast<float>(columns);
      const RowMeans means{kHasMean ? div_(gradients.take(), count) : 0.0f, div_(products.take(), count)};
      write_gradient(s, dy, weight, columns, mean, rstd, means, dsum, row_of<StreamElement>(work.dx, first));
    }
  }
}

}  // namespace

void check_layer_norm(const LayerNormForward& work) {
  require(
      work.to.transposed == nullptr,
      "layer normalisation makes no transposed 8-bit floats; cast its y by fp8_cast where these are needed");
  require(work.rows == 0 || work.x != nullptr || work.branch != nullptr,
          "layer normalisation needs what it normalises; pass x, a branch, or both");
  require(work.branch != nullptr || work.sum == nullptr,
          "layer normalisation without a branch makes no sum; use x, which is the same");
  require(work.branch == nullptr || work.dropout.threshold == 0 || work.columns % 4 == 0,
          "dropout before layer normalisation needs columns that are a multiple of 4, not ", work.columns,
          "; pad the rows or leave dropout out");
  const bool is_normalized = work.y != nullptr || work.mean != nullptr || work.rstd != nullptr ||
                             work.to.codes != nullptr || work.to.measured != nullptr;
  require(work.weight != nullptr || !is_normalized,
          "layer normalisation without a weight makes only the sum; pass a weight of ones");
  require(work.normalization == Normalization::layer || (work.bias == nullptr && work.mean == nullptr),
          "normalisation by the root of the mean square has neither a bias nor a mean; pass null for both");
  with_layer_norm_types(work.stream, work.branch_type, work.parameter_type, [](auto, auto, auto) {});
}

void check_layer_norm(const LayerNormBackward& work) {
  const bool are_summed = work.rows > 0 && (work.dweight != nullptr || work.dbias != nullptr);
  require(work.partials != nullptr || !are_summed,
          "gradients of the parameters of a layer normalisation need memory for partial sums; pass it");
  require(work.normalization == Normalization::layer || work.dbias == nullptr,
          "normalisation by the root of the mean square has no bias, and so no gradient of it; pass null");
  with_layer_norm_types(work.stream, work.gradient_type, work.parameter_type, [](auto, auto, auto) {});
}

void layer_norm_cpu(const LayerNormForward& work, int64_t begin, int64_t end) {
  check_layer_norm(work);
  with_layer_norm_types(
      work.stream, work.branch_type, work.parameter_type, [&](auto stream, auto branch, auto parameter) {
        with_normalization(work.normalization, [&](auto kind) {
          forward_rows<decltype(kind)::value, decltype(stream), decltype(branch), decltype(parameter)>(
              work, begin, end);
        });
      });
}

void layer_norm_backward_cpu(const LayerNormBackward& work, int64_t begin, int64_t end) {
  check_layer_norm(work);
  with_layer_norm_types(
      work.stream, work.gradient_type, work.parameter_type, [&](auto stream, auto gradient, auto parameter) {
        with_normalization(work.normalization, [&](auto kind) {
          backward_parts<decltype(kind)::value, decltype(stream), decltype(gradient), decltype(parameter)>(
              work, begin, end);
        });
      });
}

void layer_norm_parameters_cpu(const LayerNormBackward& work, int64_t begin, int64_t end) {
  check_layer_norm(work);
  const FullDenormals full_denormals;
  const int64_t parts = layer_norm_parts(work.rows, work.columns);
  const float* const of_bias = work.partials + parts * work.columns;
  if (work.dweight != nullptr) sum_parts(work.partials, parts, work.columns, begin, end, work.dweight);
  if (work.dbias != nullptr) sum_parts(of_bias, parts, work.columns, begin, end, work.dbias);
}

}  // namespace pacer::kernels
