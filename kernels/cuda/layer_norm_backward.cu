// The CUDA side of layer normalisation, backward. A warp (short rows) or a block (others) goes through the
// rows of one part: while it works on a row, the next one is copied to shared memory, where each lane reads
// only what it has copied itself, once for the sums and once for the gradient. Partial sums of the gradients
// of the parameters stay in registers for the whole part.
#include <pacer/kernels/layer_norm.h>

#include <pacer/kernels/cuda/layer_norm_row.cuh>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {
namespace {

constexpr int kLayerNormColumnsOfBlock = 32;  // in the sum over parts

// Where a row lies in shared memory, in words of 16 bytes: dy, s and, where there is one, dsum, each
// (pieces, words of a piece, lanes), so that lanes beside each other use banks beside each other.
template <class StreamElement, class Gradient, int kLanes>
struct LayerNormStage {
  static constexpr int kGradientWords = LayerNormPiece<Gradient>::kWords;
  static constexpr int kStreamWords = LayerNormPiece<StreamElement>::kWords;
  PACER_HOST_DEVICE static int pieces(int64_t columns) {
    return static_cast<int>((columns + kLanes * kLayerNormPiece - 1) / (kLanes * kLayerNormPiece));
  }
  PACER_HOST_DEVICE static int words(int64_t columns, bool has_dsum) {
    return pieces(columns) * kLanes * (kGradientWords + (has_dsum ? 2 : 1) * kStreamWords);
  }

  uint4 *dy, *s, *dsum;
  __device__ __forceinline__ LayerNormStage(uint4* memory, int64_t columns, int lane)
      : dy(memory + lane),
        s(dy + pieces(columns) * kLanes * kGradientWords),
        dsum(s + pieces(columns) * kLanes * kStreamWords) {}
};

template <int kLanes, class T>
__device__ __forceinline__ void copy_piece_async(const T* global, uint4* of_lane, int e) {
  constexpr int kWords = LayerNormPiece<T>::kWords;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    copy_packet_async(reinterpret_cast<const uint32_t*>(global) + 4 * w,
                      *reinterpret_cast<uint32_t(*)[4]>(of_lane + (e * kWords + w) * kLanes));
  }
}

template <int kLanes, class T>
__device__ __forceinline__ void read_staged_piece(const uint4* of_lane, int e,
                                                  float (&values)[kLayerNormPiece]) {
  LayerNormPiece<T> piece;
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) piece.words[w] = of_lane[(e * piece.kWords + w) * kLanes];
  unpack_piece(piece, values);
}

// The arguments as the types they have.
template <class StreamElement, class Gradient, class Parameter>
struct LayerNormRows {
  int64_t rows, part_rows, parts, columns;
  const Gradient* dy;
  const StreamElement *s, *dsum;
  const float *mean, *rstd;
  const Parameter* weight;
  StreamElement* dx;
  float* partials;
};

template <Normalization kNormalization, class StreamElement, class Gradient, class Parameter, int kLanes>
__global__ void __launch_bounds__(kLayerNormThreads<kLanes>, kLanes < 512 ? 2 : 1)
    layer_norm_backward_kernel(const __grid_constant__ LayerNormRows<StreamElement, Gradient, Parameter> work,
                               int stages) {
  using Stage = LayerNormStage<StreamElement, Gradient, kLanes>;
  constexpr bool kHasMean = kNormalization == Normalization::layer;
  constexpr int kParts = kLayerNormThreads<kLanes> / kLanes;
  extern __shared__ uint4 layer_norm_stages[];
  constexpr int kSums = kHasMean ? 2 : 1;
  __shared__ alignas(16) float of_warps[2][kSums][kLanes / kLayerNormWarp];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, slot = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kParts + slot;
  // A block whose lanes share a row has one part: all its threads meet in the sums.
  if (kLanes == kLayerNormWarp && part >= work.parts) return;
  const bool has_dsum = work.dsum != nullptr;
  const int columns = static_cast<int>(work.columns), words = Stage::words(columns, has_dsum);
  uint4* const memory = layer_norm_stages + slot * stages * words;
  const int64_t begin = part * work.part_rows;
  const int64_t end = begin + work.part_rows < work.rows ? begin + work.part_rows : work.rows;

  const auto copy_row = [&](int64_t row, uint4* to) {
    const Stage stage(to, columns, lane);
    const int64_t first = row * work.columns;
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
      const int column = piece_column<kLanes>(e);
      if (column >= columns) continue;
      copy_piece_async<kLanes>(work.dy + first + column, stage.dy, e);
      copy_piece_async<kLanes>(work.s + first + column, stage.s, e);
      if (has_dsum) copy_piece_async<kLanes>(work.dsum + first + column, stage.dsum, e);
    }
  };

  float dweight[kLayerNormPieces][kLayerNormPiece] = {}, dbias[kLayerNormPieces][kLayerNormPiece] = {};
  if (stages == 2) copy_row(begin, memory);
  float next_mean = kHasMean ? work.mean[begin] : 0.0f, next_rstd = work.rstd[begin];
  for (int64_t row = begin; row < end; ++row) {
    const int turn = static_cast<int>(row - begin) & 1;
    uint4* const mine = memory + (stages == 2 ? turn * words : 0);
    if (stages == 1) copy_row(row, mine);
    wait_for_copies();
    const float mean = next_mean, rstd = next_rstd;
    if (row + 1 < end) {
      if (stages == 2) copy_row(row + 1, memory + (1 - turn) * words);
      if constexpr (kHasMean) next_mean = work.mean[row + 1];
      next_rstd = work.rstd[row + 1];
    }

    const Stage stage(mine, columns, lane);
    // Of dy * weight times normalized, and, where there is a mean, of dy * weight.
    float accumulators[kSums][kLayerNormPiece] = {};
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
      const int column = piece_column<kLanes>(e);
      if (column >= columns) continue;
      float dy[kLayerNormPiece], s[kLayerNormPiece], weight[kLayerNormPiece];
      read_staged_piece<kLanes, Gradient>(stage.dy, e, dy);
      read_staged_piece<kLanes, StreamElement>(stage.s, e, s);
      read_parameter_piece(work.weight + column, weight);
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; ++k) {
        const float dy_weight = mul_(dy[k], weight[k]), x = normalized(s[k], mean, rstd);
        accumulators[0][k] = fma_(dy_weight, x, accumulators[0][k]);
        dweight[e][k] = fma_(dy[k], x, dweight[e][k]);
        if constexpr (kHasMean) {
          accumulators[1][k] += dy_weight;
          dbias[e][k] += dy[k];
        }
      }
    }
    // Before a row takes this turn's memory again, all threads meet in the row between.
    float sums[kSums];
    sum_of_lanes<kLanes>(accumulators, of_warps[turn], sums);
    const float mean_product = div_(sums[0], static_cast<float>(columns)),
                mean_gradient = kHasMean ? div_(sums[kSums - 1], static_cast<float>(columns)) : 0.0f;
#pragma unroll
    for (int e = 0; e < kLayerNormPieces; ++e) {
      const int column = piece_column<kLanes>(e);
      if (column >= columns) continue;
      float dy[kLayerNormPiece], s[kLayerNormPiece], weight[kLayerNormPiece], dsum[kLayerNormPiece] = {};
      read_staged_piece<kLanes, Gradient>(stage.dy, e, dy);
      read_staged_piece<kLanes, StreamElement>(stage.s, e, s);
      read_parameter_piece(work.weight + column, weight);
      if (has_dsum) read_staged_piece<kLanes, StreamElement>(stage.dsum, e, dsum);
      float dx[kLayerNormPiece];
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; ++k) {
        dx[k] = layer_norm_gradient(mul_(dy[k], weight[k]), normalized(s[k], mean, rstd), rstd, mean_gradient,
                                    mean_product, dsum[k]);
      }
      write_piece(pack_piece<StreamElement>(dx), work.dx + row * work.columns + column);
    }
  }
  let_next_kernel_start();
  if (work.partials == nullptr) return;
#pragma unroll
  for (int e = 0; e < kLayerNormPieces; ++e) {
    const int column = piece_column<kLanes>(e);
    if (column >= columns) continue;
    store_packet(work.partials + part * work.columns + column, dweight[e]);
    if constexpr (kHasMean) {
      store_packet(work.partials + (work.parts + part) * work.columns + column, dbias[e]);
    }
  }
}

// Even blocks add up dweight, odd ones dbias: a warp has every kLayerNormPartLanes-th part of its columns.
__global__ void __launch_bounds__(kLayerNormColumnsOfBlock* kLayerNormPartLanes)
    layer_norm_parameters_kernel(const float* partials, int64_t parts, int64_t columns, float* dweight,
                                 float* dbias) {
  __shared__ float sums[kLayerNormPartLanes][kLayerNormColumnsOfBlock];
  wait_for_previous_kernel();
  const int which = blockIdx.x % 2, turn = threadIdx.x / kLayerNormColumnsOfBlock,
            place = threadIdx.x % kLayerNormColumnsOfBlock;
  float* to = which == 0 ? dweight : dbias;
  if (to == nullptr) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x / 2) * kLayerNormColumnsOfBlock + place;
  float sum = 0;
  if (column < columns) {
    const float* from = partials + which * parts * columns + column;
#pragma unroll 16
    for (int64_t part = turn; part < parts; part += kLayerNormPartLanes) sum += from[part * columns];
  }
  sums[turn][place] = sum;
  __syncthreads();
  if (turn != 0 || column >= columns) return;
  float of_turns[kLayerNormPartLanes];
#pragma unroll
  for (int i = 0; i < kLayerNormPartLanes; ++i) of_turns[i] = sums[i][place];
  to[column] = fold_warps(of_turns);
}

// A block's shared memory, for two rows of that size, or one where there is no more. `is_crowded`: a quarter more where the GPU
// has it, so that fewer blocks share a multiprocessor.
struct LayerNormMemory {
  int stages, bytes;
};
LayerNormMemory layer_norm_memory_for(int bytes, bool is_crowded) {
  constexpr int kOther = 1024;  // of the kernel itself and of the system
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  require(bytes + kOther <= most, "layer normalisation of rows this long needs ", bytes + kOther,
          " bytes of shared memory backward and the GPU has ", most, "; use 16-bit gradients");
  const int stages = 2 * bytes + kOther <= most ? 2 : 1, wanted = stages * bytes * (is_crowded ? 5 : 4) / 4;
  return {stages, wanted + kOther <= most ? wanted : stages * bytes};
}

template <Normalization kNormalization, class StreamElement, class Gradient, class Parameter, int kLanes>
void launch_layer_norm_backward(const LayerNormBackward& work, cudaStream_t stream) {
  const LayerNormRows<StreamElement, Gradient, Parameter> rows{work.rows,
                                                               layer_norm_part_rows(work.rows, work.columns),
                                                               layer_norm_parts(work.rows, work.columns),
                                                               work.columns,
                                                               static_cast<const Gradient*>(work.dy),
                                                               static_cast<const StreamElement*>(work.s),
                                                               static_cast<const StreamElement*>(work.dsum),
                                                               work.mean,
                                                               work.rstd,
                                                               static_cast<const Parameter*>(work.weight),
                                                               static_cast<StreamElement*>(work.dx),
                                                               work.partials};
  constexpr int kThreads = kLayerNormThreads<kLanes>;
  using Stage = LayerNormStage<StreamElement, Gradient, kLanes>;
  const int bytes = Stage::words(work.columns, work.dsum != nullptr) * static_cast<int>(sizeof(uint4)) *
                    (kThreads / kLanes);
  // Without a mean a lane needs so few registers that four blocks would share a multiprocessor, which take longer than three:
  // 0.114 ms and 0.093 on an H200, 8192 rows of 4096 columns in bf16.
  constexpr bool kIsCrowded = kNormalization == Normalization::rms && kLanes == 128;
  const LayerNormMemory memory = layer_norm_memory_for(bytes, kIsCrowded);
  const auto kernel = layer_norm_backward_kernel<kNormalization, StreamElement, Gradient, Parameter, kLanes>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory.bytes);
  kernel<<<layer_norm_blocks<kLanes>(rows.parts), kThreads, static_cast<size_t>(memory.bytes), stream>>>(
      rows, memory.stages);
  check_launch("layer normalisation backward");
}

}  // namespace

void layer_norm_backward_cuda(const LayerNormBackward& work, Stream stream) {
  check_layer_norm(work);
  check_layer_norm_columns(work.columns);
  check_layer_norm_memory(work.dy, work.s, work.weight, work.dsum, work.dx, work.partials);
  const auto on = static_cast<cudaStream_t>(stream);
  if (work.rows > 0) {
    with_layer_norm_types(
        work.stream, work.gradient_type, work.parameter_type,
        [&](auto of_stream, auto of_gradient, auto of_weight) {
          with_layer_norm_lanes(work.columns, [&](auto lanes) {
            with_normalization(work.normalization, [&](auto kind) {
              launch_layer_norm_backward<decltype(kind)::value, decltype(of_stream), decltype(of_gradient),
                                         decltype(of_weight), decltype(lanes)::value>(work, on);
            });
          });
        });
  }
  if (work.dweight == nullptr && work.dbias == nullptr) return;
  sum_layer_norm_parts({work.partials, layer_norm_parts(work.rows, work.columns), work.columns, work.dweight,
                        work.dbias, /*follows_partials=*/work.rows > 0},
                       on);
}

void sum_layer_norm_parts(const LayerNormParts& parts, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(2 * ceil_divide(parts.columns, kLayerNormColumnsOfBlock));
  launch_overlapped("the sum of the gradients of a layer normalisation",
                    /*overlap_wanted=*/parts.follows_partials, layer_norm_parameters_kernel, blocks,
                    kLayerNormColumnsOfBlock * kLayerNormPartLanes, stream, parts.partials, parts.parts,
                    parts.columns, parts.first, parts.second);
}

}  // namespace pacer::kernels
