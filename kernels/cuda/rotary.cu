// The CUDA side of norms and rotations of heads. A head lies in the registers of its lanes, of which a warp has several.
// Angles come from the first-level cache, where the heads of a token share them.
#include <pacer/kernels/rotary.h>

#include <pacer/kernels/cuda/rotary_head.cuh>

namespace pacer::kernels {
namespace {

// Heads that the lanes of one have in turn, all of which are on their way at once: as many as registers hold.
template <class Element, bool kHasNorms>
constexpr int kHeadsAtOnce = kHasNorms || sizeof(Element) == 4 ? 2 : 4;

// Heads that follow one another, for `lanes` threads; those of a row share its angles. `sign`: -1 turns back.
template <class Element, class Parameter, bool kHasNorms>
__global__ void __launch_bounds__(kRotaryThreads, 3)
    rotary_kernel(const __grid_constant__ RotaryForward work, const __grid_constant__ RotaryHeads copied,
                  unsigned heads_in_all, float sign) {
  constexpr int kHeads = kHeadsAtOnce<Element, kHasNorms>;
  const HeadLane mine(work.head_dim);
  const int64_t half = work.head_dim / 2;
  const int column = mine.column();
  const auto of_row = static_cast<unsigned>(work.q.heads + work.k.heads + copied.heads);
  const unsigned first_number = kHeads * (blockIdx.x * static_cast<unsigned>(kRotaryThreads / mine.lanes) +
                                          static_cast<unsigned>(mine.slot));
  const auto is_there = [&](int h) { return first_number + h < heads_in_all && column < half; };
  HeadPieces<Element> pieces[kHeads];
  CountedHead at(first_number, of_row);
#pragma unroll
  for (int h = 0; h < kHeads; ++h, at.advance(of_row)) {
    const HeadOfKind head(work, copied, at.in_row);
    pieces[h] = {};
    if (!is_there(h)) continue;
    pieces[h] =
        read_head<Element>(head.kind->from, at.row * head.kind->from_stride + head.channel + column, half);
  }

  at = CountedHead(first_number, of_row);
  HeadAngles angles = {};
  unsigned row_of_angles = 0xFFFFFFFFu;
#pragma unroll
  for (int h = 0; h < kHeads; ++h, at.advance(of_row)) {
    const HeadOfKind head(work, copied, at.in_row);
    float first[kLayerNormPiece], second[kLayerNormPiece];
    unpack_head(pieces[h], first, second);
    if constexpr (kHasNorms) {
      float x1[kLayerNormPiece], x2[kLayerNormPiece];
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; ++k) {
        x1[k] = first[k];
        x2[k] = second[k];
      }
      normalize_head(x1, x2, work.head_dim, work.epsilon, mine.lanes);  // also where it is for nothing
      if (is_there(h) && head.kind->weight != nullptr) {
        float weight1[kLayerNormPiece], weight2[kLayerNormPiece];
        read_weight<Parameter>(head.kind->weight, column, half, weight1, weight2);
        multiply(weight1, x1);
        multiply(weight2, x2);
#pragma unroll
        for (int k = 0; k < kLayerNormPiece; ++k) {
          first[k] = x1[k];
          second[k] = x2[k];
        }
      }
    }
    if (!is_there(h)) continue;
    if (work.cosines != nullptr && !head.is_copied) {
      if (at.row != row_of_angles) angles = angles_at(work, at.row, column);
      row_of_angles = at.row;
      rotate_head(angles, sign, first, second);
    }
    write_head<Element>(first, second, at.row * head.kind->to_stride + head.channel + column, half,
                        head.kind->to);
  }
}

// One kind of heads in a part, backward through rotation and norm.
template <class Element, class Parameter>
__device__ __forceinline__ void norm_backward_of_part(const RotaryBackward& work, const RotaryHeads& kind,
                                                      const void* read, int64_t read_stride, int64_t begin,
                                                      int64_t end, float* partial, float* sums) {
  const HeadLane mine(work.head_dim);
  const int64_t half = work.head_dim / 2;
  const int slots = kRotaryThreads / mine.lanes, column = mine.column();
  const bool has_channels = column < half;
  float dweight1[kLayerNormPiece] = {}, dweight2[kLayerNormPiece] = {};
  const auto heads = static_cast<unsigned>(kind.heads), count = static_cast<unsigned>(end - begin) * heads;
  // All threads of a warp meet in the sums.
  for (unsigned base = 0; base < count; base += static_cast<unsigned>(slots)) {
    const unsigned number = base + static_cast<unsigned>(mine.slot);
    const bool is_there = number < count && has_channels;
    const auto row = static_cast<unsigned>(begin) + number / heads;
    const int64_t first_channel = static_cast<int64_t>(number % heads) * work.head_dim + column;
    float g1[kLayerNormPiece] = {}, g2[kLayerNormPiece] = {}, n1[kLayerNormPiece] = {},
          n2[kLayerNormPiece] = {};
    if (is_there) {
      const auto of_gradient = read_head<Element>(kind.from, row * kind.from_stride + first_channel, half);
      const auto of_read = read_head<Element>(read, row * read_stride + first_channel, half);
      unpack_head(of_gradient, g1, g2);
      unpack_head(of_read, n1, n2);
      if (work.cosines != nullptr) rotate_head(angles_at(work, row, column), -1.0f, g1, g2);
    }
    const float rstd = normalize_head(n1, n2, work.head_dim, work.epsilon, mine.lanes);
    if (is_there) {
#pragma unroll
      for (int k = 0; k < kLayerNormPiece; ++k) {
        dweight1[k] = fma_(g1[k], n1[k], dweight1[k]);
        dweight2[k] = fma_(g2[k], n2[k], dweight2[k]);
      }
    }
    if (has_channels) {  // read for each head again: registers are what this kernel lacks
      float weight1[kLayerNormPiece], weight2[kLayerNormPiece];
      read_weight<Parameter>(kind.weight, column, half, weight1, weight2);
      multiply(weight1, g1);
      multiply(weight2, g2);
    }
    const float mean_product =
        div_(sum_of_head_products(g1, g2, n1, n2, mine.lanes), static_cast<float>(work.head_dim));
    if (!is_there) continue;
#pragma unroll
    for (int k = 0; k < kLayerNormPiece; ++k) {
      g1[k] = layer_norm_gradient(g1[k], n1[k], rstd, 0.0f, mean_product, 0.0f);
      g2[k] = layer_norm_gradient(g2[k], n2[k], rstd, 0.0f, mean_product, 0.0f);
    }
    write_head<Element>(g1, g2, row * kind.to_stride + first_channel, half, kind.to);
  }
  if (partial == nullptr) return;

  // (slots, head_dim), which fit: slots * lanes * 16 are 16 for each thread.
  const int channels = static_cast<int>(work.head_dim);
  __syncthreads();
  if (has_channels) {
#pragma unroll
    for (int k = 0; k < kLayerNormPiece; ++k) {
      sums[mine.slot * channels + column + k] = dweight1[k];
      sums[mine.slot * channels + static_cast<int>(half) + column + k] = dweight2[k];
    }
  }
  for (int h = slots / 2; h >= 1; h /= 2) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < h * channels; i += kRotaryThreads) {
      sums[i] += sums[i + h * channels];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += kRotaryThreads) partial[i] = sums[i];
}

// The same without a norm.
template <class Element>
__device__ __forceinline__ void turn_back_part(const RotaryBackward& work, const RotaryHeads& kind,
                                               bool is_rotated, int64_t begin, int64_t end) {
  const HeadLane mine(work.head_dim);
  const int64_t half = work.head_dim / 2;
  if (mine.column() >= half) return;
  const auto heads = static_cast<unsigned>(kind.heads), count = static_cast<unsigned>(end - begin) * heads;
  for (auto number = static_cast<unsigned>(mine.slot); number < count;
       number += static_cast<unsigned>(kRotaryThreads / mine.lanes)) {
    const auto row = static_cast<unsigned>(begin) + number / heads;
    const int64_t first_channel = static_cast<int64_t>(number % heads) * work.head_dim + mine.column();
    float first[kLayerNormPiece], second[kLayerNormPiece];
    unpack_head(read_head<Element>(kind.from, row * kind.from_stride + first_channel, half), first, second);
    if (is_rotated) rotate_head(angles_at(work, row, mine.column()), -1.0f, first, second);
    write_head<Element>(first, second, row * kind.to_stride + first_channel, half, kind.to);
  }
}

// A block has a part of the rows.
template <class Element, class Parameter>
__global__ void __launch_bounds__(kRotaryThreads, 3)
    rotary_norm_backward_kernel(const __grid_constant__ RotaryBackward work, int64_t part_rows) {
  __shared__ float sums[kRotaryThreads * 2 * kLayerNormPiece];
  const int64_t begin = blockIdx.x * part_rows,
                end = begin + part_rows < work.rows ? begin + part_rows : work.rows;
  const auto partial = [&](int which) {
    if (work.partials == nullptr) return static_cast<float*>(nullptr);
    return work.partials + (static_cast<int64_t>(which) * gridDim.x + blockIdx.x) * work.head_dim;
  };
  const bool is_rotated = work.cosines != nullptr;
  if (work.q.weight != nullptr) {
    norm_backward_of_part<Element, Parameter>(work, work.q, work.q_read, work.q_read_stride, begin, end,
                                              partial(0), sums);
  } else {
    turn_back_part<Element>(work, work.q, is_rotated, begin, end);
  }
  if (work.k.weight != nullptr) {
    norm_backward_of_part<Element, Parameter>(work, work.k, work.k_read, work.k_read_stride, begin, end,
                                              partial(1), sums);
  } else {
    turn_back_part<Element>(work, work.k, is_rotated, begin, end);
  }
  turn_back_part<Element>(work, work.v, /*is_rotated=*/false, begin, end);
  let_next_kernel_start();
}

void check_heads_on_gpu(const RotaryHeads& heads) {
  require(heads.from_stride % kLayerNormPiece == 0 && heads.to_stride % kLayerNormPiece == 0,
          "the rotation of heads on a GPU needs rows that begin at multiples of ", kLayerNormPiece,
          " elements, not ", heads.from_stride, " and ", heads.to_stride, " apart; copy the matrix");
  require(
      is_aligned(heads.from) && is_aligned(heads.to) && is_aligned(heads.weight),
      "the rotation of heads on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
}

void check_on_gpu(const RotaryForward& work, int64_t heads_of_row) {
  require(work.head_dim % (2 * kLayerNormPiece) == 0,
          "the rotation of heads on a GPU needs channels that are a multiple of ", 2 * kLayerNormPiece,
          ", not ", work.head_dim, "; pad the heads or use the CPU");
  require(work.rows * heads_of_row < (int64_t{1} << 31),
          "the rotation of heads has more than 2^31 heads in one pass; split the batch");
  require(
      is_aligned(work.cosines) && is_aligned(work.sines),
      "the rotation of heads on a GPU needs angles that begin at a multiple of 16 bytes; copy the tensor");
  check_heads_on_gpu(work.q);
  check_heads_on_gpu(work.k);
}

template <class Visit>
void with_rotary_types(const RotaryForward& work, const Visit& visit) {
  with_layer_norm_types(work.type, work.type, work.parameter_type,
                        [&](auto, auto element, auto parameter) { visit(element, parameter); });
}

template <class Element, class Parameter, bool kHasNorms>
void launch_rotary_of(const RotaryForward& work, const RotaryHeads& copied, int64_t heads, float sign,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(
      ceil_divide(heads, kHeadsAtOnce<Element, kHasNorms> * rotary_slots(work.head_dim)));
  rotary_kernel<Element, Parameter, kHasNorms>
      <<<blocks, kRotaryThreads, 0, stream>>>(work, copied, static_cast<unsigned>(heads), sign);
}

void launch_rotary(const RotaryForward& work, const RotaryHeads& copied, float sign, cudaStream_t stream) {
  const int64_t heads = work.rows * (work.q.heads + work.k.heads + copied.heads);
  if (heads == 0) return;
  const bool has_norms = work.q.weight != nullptr || work.k.weight != nullptr;
  with_rotary_types(work, [&](auto element, auto parameter) {
    using Element = decltype(element);
    has_norms ? launch_rotary_of<Element, decltype(parameter), true>(work, copied, heads, sign, stream)
              : launch_rotary_of<Element, float, false>(work, copied, heads, sign, stream);
  });
  check_launch("the rotation of heads");
}

}  // namespace

void rotary_cuda(const RotaryForward& work, Stream stream) {
  check_rotary(work);
  check_on_gpu(work, work.q.heads + work.k.heads);
  launch_rotary(work, {}, 1.0f, static_cast<cudaStream_t>(stream));
}

void rotary_backward_cuda(const RotaryBackward& work, Stream stream) {
  check_rotary(work);
  check_on_gpu(work, work.q.heads + work.k.heads + work.v.heads);
  check_heads_on_gpu(work.v);
  const auto on = static_cast<cudaStream_t>(stream);
  if (work.q.weight == nullptr && work.k.weight == nullptr) return launch_rotary(work, work.v, -1.0f, on);
  require(
      work.q_read_stride % kLayerNormPiece == 0 && work.k_read_stride % kLayerNormPiece == 0 &&
          is_aligned(work.q_read) && is_aligned(work.k_read),
      "norms of heads on a GPU need what they have normalised in rows that begin at multiples of 16 bytes; "
      "copy the matrix");
  const int64_t parts = rotary_parts(work.rows);
  if (work.rows > 0) {
    with_rotary_types(work, [&](auto element, auto parameter) {
      rotary_norm_backward_kernel<decltype(element), decltype(parameter)>
          <<<static_cast<unsigned>(parts), kRotaryThreads, 0, on>>>(work, rotary_part_rows(work.rows));
    });
    check_launch("the rotation of heads backward");
  }
  if (work.dq_weight == nullptr && work.dk_weight == nullptr) return;
  sum_layer_norm_parts({work.partials, parts, work.head_dim, work.dq_weight, work.dk_weight,
                        /*follows_partials=*/work.rows > 0},
                       on);
}

}  // namespace pacer::kernels
