// The CUDA side of norms and rotations of heads. A head lies in the registers of its lanes, each with eight
// channels of the first half and the eight that turn with them; a warp has several heads. Angles come from the
// first-level cache, where the heads of a token share them.
#include <pacer/kernels/rotary.h>

#include <pacer/kernels/cuda/layer_norm_row.cuh>

namespace pacer::kernels {
namespace {

constexpr int kPiece = kLayerNormPiece;
using Eights = float[kPiece];

// Where a thread stands in a head.
struct HeadLane {
  int lanes, lane, slot;
  __device__ __forceinline__ explicit HeadLane(int64_t head_dim)
      : lanes(rotary_lanes(head_dim)),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        slot(static_cast<int>(threadIdx.x) / lanes) {}
  __device__ __forceinline__ int column() const { return lane * kPiece; }
};

// The sum over a head of what its lanes have, in all of them. All threads of a warp call it.
__device__ __forceinline__ float sum_over_head(const float (&accumulators)[kPiece], int lanes) {
  float sum = sum_of_eight(accumulators);
  for (int h = lanes / 2; h >= 1; h /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, h);
  return sum;
}

__device__ __forceinline__ float sum_of_head_products(const Eights& x1, const Eights& x2, const Eights& y1,
                                                      const Eights& y2, int lanes) {
  float accumulators[kPiece];
#pragma unroll
  for (int k = 0; k < kPiece; ++k) accumulators[k] = fma_(x2[k], y2[k], mul_(x1[k], y1[k]));
  return sum_over_head(accumulators, lanes);
}

// Turns what was read into what is normalised, and returns the factor; zeros stay zeros.
__device__ __forceinline__ float normalize_head(Eights& first, Eights& second, int64_t head_dim,
                                                float epsilon, int lanes) {
  const float sum = sum_of_head_products(first, second, first, second, lanes);
  const float rstd = rstd_of(sum, static_cast<float>(head_dim), epsilon);
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    first[k] = mul_(first[k], rstd);
    second[k] = mul_(second[k], rstd);
  }
  return rstd;
}

__device__ __forceinline__ void rotate_head(const RotaryForward& work, unsigned row, int column, float sign,
                                            Eights& first, Eights& second) {
  const unsigned place = row % static_cast<unsigned>(work.sequence);
  const int64_t at = place * (work.head_dim / 2) + column;
  float cosines[kPiece], sines[kPiece];
  read_parameter_piece(work.cosines + at, cosines);
  read_parameter_piece(work.sines + at, sines);
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    const RotatedPair pair = rotated(first[k], second[k], cosines[k], mul_(sign, sines[k]));
    first[k] = pair.first;
    second[k] = pair.second;
  }
}

template <class Element>
__device__ __forceinline__ void read_head(const void* memory, int64_t at, int64_t half, Eights& first,
                                          Eights& second) {
  const auto* head = static_cast<const Element*>(memory) + at;
  const auto of_first = read_piece_once(head), of_second = read_piece_once(head + half);
  unpack_piece(of_first, first);
  unpack_piece(of_second, second);
}

template <class Element>
__device__ __forceinline__ void write_head(const Eights& first, const Eights& second, int64_t at,
                                           int64_t half, void* memory) {
  auto* head = static_cast<Element*>(memory) + at;
  write_piece(pack_piece<Element>(first), head);
  write_piece(pack_piece<Element>(second), head + half);
}

template <class Parameter>
__device__ __forceinline__ void read_weight(const void* weight, int column, int64_t half, Eights& first,
                                            Eights& second) {
  const auto* from = static_cast<const Parameter*>(weight) + column;
  read_parameter_piece(from, first);
  read_parameter_piece(from + half, second);
}

__device__ __forceinline__ void multiply(const Eights& x, Eights& to) {
#pragma unroll
  for (int k = 0; k < kPiece; ++k) to[k] = mul_(to[k], x[k]);
}

// A head for `lanes` threads: queries of a row, keys, and what is copied. `sign`: -1 turns back.
template <class Element, class Parameter, bool kHasNorms>
__global__ void __launch_bounds__(kRotaryThreads, kHasNorms ? 5 : 6)
    rotary_kernel(const __grid_constant__ RotaryForward work, const __grid_constant__ RotaryHeads copied,
                  unsigned heads_in_all, float sign) {
  const HeadLane mine(work.head_dim);
  const int64_t half = work.head_dim / 2;
  const auto of_row = static_cast<unsigned>(work.q.heads + work.k.heads + copied.heads);
  const unsigned number =
      blockIdx.x * static_cast<unsigned>(kRotaryThreads / mine.lanes) + static_cast<unsigned>(mine.slot);
  const bool is_there = number < heads_in_all && mine.column() < half;
  const unsigned row = number / of_row, head = number % of_row;
  const auto queries = static_cast<unsigned>(work.q.heads), keys = static_cast<unsigned>(work.k.heads);
  const bool is_query = head < queries, is_copied = head >= queries + keys;
  const RotaryHeads& kind = is_query ? work.q : is_copied ? copied : work.k;
  const unsigned in_kind = is_query ? head : is_copied ? head - queries - keys : head - queries;
  const int64_t first_channel = static_cast<int64_t>(in_kind) * work.head_dim + mine.column();
  float first[kPiece] = {}, second[kPiece] = {};
  if (is_there) read_head<Element>(kind.from, row * kind.from_stride + first_channel, half, first, second);
  if constexpr (kHasNorms) {
    float x1[kPiece], x2[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      x1[k] = first[k];
      x2[k] = second[k];
    }
    normalize_head(x1, x2, work.head_dim, work.epsilon, mine.lanes);  // also where it is for nothing
    if (is_there && kind.weight != nullptr) {
      float weight1[kPiece], weight2[kPiece];
      read_weight<Parameter>(kind.weight, mine.column(), half, weight1, weight2);
      multiply(weight1, x1);
      multiply(weight2, x2);
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        first[k] = x1[k];
        second[k] = x2[k];
      }
    }
  }
  if (!is_there) return;
  if (work.cosines != nullptr && !is_copied) {
    rotate_head(work, row, mine.column(), sign, first, second);
  }
  write_head<Element>(first, second, row * kind.to_stride + first_channel, half, kind.to);
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
  float dweight1[kPiece] = {}, dweight2[kPiece] = {};
  const auto heads = static_cast<unsigned>(kind.heads), count = static_cast<unsigned>(end - begin) * heads;
  // All threads of a warp meet in the sums.
  for (unsigned base = 0; base < count; base += static_cast<unsigned>(slots)) {
    const unsigned number = base + static_cast<unsigned>(mine.slot);
    const bool is_there = number < count && has_channels;
    const auto row = static_cast<unsigned>(begin) + number / heads;
    const int64_t first_channel = static_cast<int64_t>(number % heads) * work.head_dim + column;
    float g1[kPiece] = {}, g2[kPiece] = {}, n1[kPiece] = {}, n2[kPiece] = {};
    if (is_there) {
      read_head<Element>(kind.from, row * kind.from_stride + first_channel, half, g1, g2);
      read_head<Element>(read, row * read_stride + first_channel, half, n1, n2);
      if (work.cosines != nullptr) rotate_head(work, row, column, -1.0f, g1, g2);
    }
    const float rstd = normalize_head(n1, n2, work.head_dim, work.epsilon, mine.lanes);
    if (is_there) {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        dweight1[k] = fma_(g1[k], n1[k], dweight1[k]);
        dweight2[k] = fma_(g2[k], n2[k], dweight2[k]);
      }
    }
    if (has_channels) {  // read for each head again: registers are what this kernel lacks
      float weight1[kPiece], weight2[kPiece];
      read_weight<Parameter>(kind.weight, column, half, weight1, weight2);
      multiply(weight1, g1);
      multiply(weight2, g2);
    }
    const float mean_product =
        div_(sum_of_head_products(g1, g2, n1, n2, mine.lanes), static_cast<float>(work.head_dim));
    if (!is_there) continue;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
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
    for (int k = 0; k < kPiece; ++k) {
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
    float first[kPiece], second[kPiece];
    read_head<Element>(kind.from, row * kind.from_stride + first_channel, half, first, second);
    if (is_rotated) rotate_head(work, row, mine.column(), -1.0f, first, second);
    write_head<Element>(first, second, row * kind.to_stride + first_channel, half, kind.to);
  }
}

// A block has a part of the rows.
template <class Element, class Parameter>
__global__ void __launch_bounds__(kRotaryThreads, 3)
    rotary_norm_backward_kernel(const __grid_constant__ RotaryBackward work, int64_t part_rows) {
  __shared__ float sums[kRotaryThreads * 2 * kPiece];
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
  require(heads.from_stride % kPiece == 0 && heads.to_stride % kPiece == 0,
          "the rotation of heads on a GPU needs rows that begin at multiples of ", kPiece, " elements, not ",
          heads.from_stride, " and ", heads.to_stride, " apart; copy the matrix");
  require(
      is_aligned(heads.from) && is_aligned(heads.to) && is_aligned(heads.weight),
      "the rotation of heads on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
}

void check_on_gpu(const RotaryForward& work, int64_t heads_of_row) {
  require(work.head_dim % (2 * kPiece) == 0,
          "the rotation of heads on a GPU needs channels that are a multiple of ", 2 * kPiece, ", not ",
          work.head_dim, "; pad the heads or use the CPU");
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

void launch_rotary(const RotaryForward& work, const RotaryHeads& copied, float sign, cudaStream_t stream) {
  const int64_t heads = work.rows * (work.q.heads + work.k.heads + copied.heads);
  if (heads == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_divide(heads, rotary_slots(work.head_dim)));
  const bool has_norms = work.q.weight != nullptr || work.k.weight != nullptr;
  with_rotary_types(work, [&](auto element, auto parameter) {
    using Element = decltype(element);
    const auto kernel =
        has_norms ? rotary_kernel<Element, decltype(parameter), true> : rotary_kernel<Element, float, false>;
    kernel<<<blocks, kRotaryThreads, 0, stream>>>(work, copied, static_cast<unsigned>(heads), sign);
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
      work.q_read_stride % kPiece == 0 && work.k_read_stride % kPiece == 0 && is_aligned(work.q_read) &&
          is_aligned(work.k_read),
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
