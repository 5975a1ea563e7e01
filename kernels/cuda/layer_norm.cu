// The CUDA side of layer normalisation, forward. A row lies in the registers of its lanes, a warp for short
// rows and a block for others, so that memory is read once and written once; blocks that wait for memory and
// blocks that add up share a multiprocessor. Parameters come from the first-level cache.
#include <pacer/kernels/layer_norm.h>

#include <pacer/kernels/cuda/layer_norm_row.cuh>
#include <pacer/kernels/cuda/note_amax.cuh>

namespace pacer::kernels {
namespace {

// A row of the residual stream, read and, where there is a branch, added up and stored.
template <class StreamElement, class BranchElement, int kLanes>
__device__ __forceinline__ void make_layer_norm_row(const LayerNormForward& work, int64_t first,
                                                    float (&s)[kLayerNormPieces][kLayerNormPiece]) {
  const auto* x = static_cast<const StreamElement*>(work.x);
  const auto* branch = static_cast<const BranchElement*>(work.branch) + first;
  const auto* branch_bias = static_cast<const BranchElement*>(work.branch_bias);
  auto* sum = static_cast<StreamElement*>(work.sum) + first;
  const bool has_branch = work.branch != nullptr;
  LayerNormPiece<StreamElement> of_x[kLayerNormPieces];
  LayerNormPiece<BranchElement> of_branch[kLayerNormPieces];
#pragma unroll
  for (int e = 0; e < kLayerNormPieces; ++e) {
    const int column = piece_column<kLanes>(e);
    if (column >= work.columns) continue;
    of_x[e] = x == nullptr ? LayerNormPiece<StreamElement>{} : read_piece_once(x + first + column);
    if (has_branch) of_branch[e] = read_piece_once(branch + column);
  }
  if (!has_branch) {
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
      if (piece_column<kLanes>(e) < work.columns) unpack_piece(of_x[e], s[e]);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kLayerNormPieces; ++e) {
    const int column = piece_column<kLanes>(e);
    if (column >= work.columns) continue;
    unpack_piece(of_branch[e], s[e]);
    if (branch_bias == nullptr) continue;
    float biases[kLayerNormPiece];
    read_parameter_piece(branch_bias + column, biases);
#pragma unroll
    for (int k = 0; k < kLayerNormPiece; ++k) s[e][k] += biases[k];
  }
  if (work.dropout.threshold != 0) {
    // Without a look at the bound: all draws in one go share the schedule of their keys.
    const int64_t first_four = (first >> 2) + (piece_column<kLanes>(0) >> 2);
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; k += 4) {
        const int four = (e * kLanes * kLayerNormPiece + k) / 4;
        const PhiloxCounter draws = dropout_draws(work.dropout, first_four + four);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[e][k + i] = drop(work.dropout, draws.word[i], s[e][k + i]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kLayerNormPieces; ++e) {
    const int column = piece_column<kLanes>(e);
    if (column >= work.columns) continue;
    float values[kLayerNormPiece];
    unpack_piece(of_x[e], values);
#pragma unroll
    for (int k = 0; k < kLayerNormPiece; ++k) s[e][k] = values[k] + s[e][k];
    const auto rounded = pack_piece<StreamElement>(s[e]);
    if (work.sum != nullptr) write_piece(rounded, sum + column);
    unpack_piece(rounded, s[e]);
  }
}

// Eight numbers as codes, four to a word, the first one lowest.
template <Fp8Format kFormat>
__device__ __forceinline__ uint2 layer_norm_codes(const float (&y)[kLayerNormPiece], float scale) {
  constexpr auto kKind = kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const auto pair = [&](int i) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(mul_(y[i], scale), mul_(y[i + 1], scale)), __NV_SATFINITE,
                                    kKind);
  };
  return make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
}

// Grows to the magnitudes of a piece, two of 16 bits at once, in the order of their bits.
template <class Element>
__device__ __forceinline__ void grow_to_piece(const LayerNormPiece<Element>& piece, uint32_t& largest) {
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) {
    const uint32_t words[4] = {piece.words[w].x, piece.words[w].y, piece.words[w].z, piece.words[w].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<Element, float>) {
        largest = max(largest, words[i] & 0x7FFFFFFFu);
      } else {
        largest = __vmaxu2(largest, words[i] & 0x7FFF7FFFu);
      }
    }
  }
}
// What it has grown to, as magnitude_bits says it.
template <class Element>
__device__ __forceinline__ uint32_t amax_of_pieces(uint32_t largest) {
  if constexpr (std::is_same_v<Element, float>) {
    return magnitude_bits(float_of(largest));
  } else {
    const uint32_t of_two = max(largest & 0xFFFFu, largest >> 16);
    return magnitude_bits(load(Element{static_cast<uint16_t>(of_two)}));
  }
}

// What becomes of y as 8-bit floats: the same in all threads.
struct LayerNormCodes {
  bool are_written, are_noted;
  float scale;
};
__device__ __forceinline__ LayerNormCodes codes_of(const Fp8Target& to) {
  const bool are_written = to.codes != nullptr;
  return {are_written, are_written || (to.measured != nullptr && !is_superfluous(to)),
          are_written ? fp8_scale(to) : 1.0f};
}

template <class BranchElement, class Parameter, int kLanes>
__device__ __forceinline__ void write_layer_norm_row(const LayerNormForward& work, int64_t first,
                                                     const float (&s)[kLayerNormPieces][kLayerNormPiece],
                                                     float mean, float rstd, const LayerNormCodes& codes,
                                                     uint32_t& largest) {
  const auto* weight = static_cast<const Parameter*>(work.weight);
  const auto* bias = static_cast<const Parameter*>(work.bias);
#pragma unroll
  for (int e = 0; e < kLayerNormPieces; ++e) {
    const int column = piece_column<kLanes>(e);
    if (column >= work.columns) continue;
    float weights[kLayerNormPiece], y[kLayerNormPiece] = {};
    read_parameter_piece(weight + column, weights);
    if (bias != nullptr) read_parameter_piece(bias + column, y);
#pragma unroll
    for (int k = 0; k < kLayerNormPiece; ++k) y[k] = fma_(normalized(s[e][k], mean, rstd), weights[k], y[k]);
    const auto rounded = pack_piece<BranchElement>(y);
    if (work.y != nullptr) write_piece(rounded, static_cast<BranchElement*>(work.y) + first + column);
    if (!codes.are_noted) continue;
    grow_to_piece(rounded, largest);
    if (!codes.are_written) continue;
    unpack_piece(rounded, y);
    *reinterpret_cast<uint2*>(work.to.codes + first + column) =
        work.to.format == Fp8Format::e4m3 ? layer_norm_codes<Fp8Format::e4m3>(y, codes.scale)
                                          : layer_norm_codes<Fp8Format::e5m2>(y, codes.scale);
  }
}

template <Normalization kNormalization, class StreamElement, class BranchElement, class Parameter, int kLanes>
__global__ void __launch_bounds__(kLayerNormThreads<kLanes>)
    layer_norm_kernel(const __grid_constant__ LayerNormForward work) {
  constexpr int kThreads = kLayerNormThreads<kLanes>;
  __shared__ alignas(16) float of_warps[2][1][kLanes / kLayerNormWarp];
  if (is_superfluous(work)) return;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int64_t first = row * work.columns;
  LayerNormCodes codes{false, false, 1.0f};
  uint32_t largest = 0;
  // A block whose lanes share a row has one: all its threads meet in the sums.
  if (kLanes > kLayerNormWarp || row < work.rows) {
    float s[kLayerNormPieces][kLayerNormPiece];
    make_layer_norm_row<StreamElement, BranchElement, kLanes>(work, first, s);
    if (work.weight == nullptr) return;
    codes = codes_of(work.to);

    const auto columns = static_cast<float>(work.columns);
    float sums[1];
    float squares[1][kLayerNormPiece] = {};
    float mean = 0;
    if constexpr (kNormalization == Normalization::layer) {
      float values[1][kLayerNormPiece] = {};
#pragma unroll
      for (int e = 0; e < kLayerNormPieces; ++e) {
        if (piece_column<kLanes>(e) >= work.columns) continue;
#pragma unroll
        for (int k = 0; k < kLayerNormPiece; ++k) values[0][k] += s[e][k];
      }
      sum_of_lanes<kLanes>(values, of_warps[0], sums);
      mean = div_(sums[0], columns);
    }
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
      if (piece_column<kLanes>(e) >= work.columns) continue;
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; ++k) {
        const float deviation = s[e][k] - mean;
        squares[0][k] = fma_(deviation, deviation, squares[0][k]);
      }
    }
    sum_of_lanes<kLanes>(squares, of_warps[1], sums);
    const float rstd = rstd_of(sums[0], columns, work.epsilon);
    if (threadIdx.x % kLanes == 0) {
      if (work.mean != nullptr) work.mean[row] = mean;
      if (work.rstd != nullptr) work.rstd[row] = rstd;
    }
    write_layer_norm_row<BranchElement, Parameter, kLanes>(work, first, s, mean, rstd, codes, largest);
  } else if (work.weight != nullptr) {
    codes = codes_of(work.to);
  }
  if (codes.are_noted) note_amax<kThreads>(work.to, amax_of_pieces<BranchElement>(largest), codes.scale);
}

}  // namespace

void layer_norm_cuda(const LayerNormForward& work, Stream stream) {
  check_layer_norm(work);
  check_layer_norm_columns(work.columns);
  check_layer_norm_memory(work.x, work.branch, work.branch_bias, work.sum, work.weight, work.bias, work.y,
                          work.to.codes);
  if (work.rows == 0) return;
  with_layer_norm_types(work.stream, work.branch_type, work.parameter_type,
                        [&](auto of_stream, auto of_branch, auto of_weight) {
                          with_layer_norm_lanes(work.columns, [&](auto lanes) {
                            constexpr int kLanes = decltype(lanes)::value;
                            with_normalization(work.normalization, [&](auto kind) {
                              layer_norm_kernel<decltype(kind)::value, decltype(of_stream),
                                                decltype(of_branch), decltype(of_weight), kLanes>
                                  <<<layer_norm_blocks<kLanes>(work.rows), kLayerNormThreads<kLanes>, 0,
                                     static_cast<cudaStream_t>(stream)>>>(work);
                            });
                          });
                        });
  check_launch("layer normalisation");
}

}  // namespace pacer::kernels
