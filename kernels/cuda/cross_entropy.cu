// The CUDA side of the cross entropy: a block has a row. It is read once for the sum of exponentials, whose largest term is
// found on the way, and for the gradient again, from the second-level cache in general. Deterministic.
#include <pacer/kernels/cross_entropy.h>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {
namespace {

constexpr int kCrossEntropyThreads = 512;
constexpr float kLog2E = 0x1.715476p0f, kLog2 = 0x1.62e43p-1f;

// exp(x) by the GPU's own power of two.
__device__ __forceinline__ float fast_exp(float x) { return exp2f(x * kLog2E); }

// sum_j exp(x_j) as sum * exp(largest), and sum_j x_j.
struct RowSums {
  float largest = -INFINITY;
  float sum = 0;
  float of_all = 0;

  // One that has seen nothing yet changes nothing.
  __device__ __forceinline__ void add(const RowSums& other) {
    const float both = fmaxf(largest, other.largest);
    if (both != -INFINITY) {
      sum = sum * fast_exp(largest - both) + other.sum * fast_exp(other.largest - both);
    } else {
      sum += other.sum;  // NaN stays
    }
    largest = both;
    of_all += other.of_all;
  }
  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N]) {
    float both = largest;
#pragma unroll
    for (int k = 0; k < N; ++k) both = fmaxf(both, x[k]);
    const float base = both == -INFINITY ? 0.0f : both;
    float terms = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      terms += fast_exp(x[k] - base);
      of_all += x[k];
    }
    sum = sum * fast_exp(largest - base) + terms;
    largest = both;
  }
};

// Of the whole block, for each of its threads.
__device__ __forceinline__ RowSums sums_of_block(RowSums mine) {
  constexpr int kWarps = kCrossEntropyThreads / kWarp;
  __shared__ RowSums of_warps[kWarps];
  const auto add_lanes = [&](int lanes) {
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      RowSums other;
      other.largest = __shfl_xor_sync(0xFFFFFFFFu, mine.largest, apart);
      other.sum = __shfl_xor_sync(0xFFFFFFFFu, mine.sum, apart);
      other.of_all = __shfl_xor_sync(0xFFFFFFFFu, mine.of_all, apart);
      mine.add(other);
    }
  };
  add_lanes(kWarp);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  mine = of_warps[threadIdx.x % kWarps];
  add_lanes(kWarps);
  return mine;
}

// kPacket: elements that a thread reads at once, 8, or 1 where rows do not begin at multiples of 16 bytes.
template <class Element, int kPacket>
__global__ void __launch_bounds__(kCrossEntropyThreads) cross_entropy_kernel(const CrossEntropy work) {
  Element* const logits = static_cast<Element*>(work.logits) + blockIdx.x * work.columns;
  uint8_t* const codes = work.codes == nullptr ? nullptr : work.codes + blockIdx.x * work.columns;
  const int64_t of_all = work.targets[blockIdx.x], target = of_all - work.first_column;
  const int64_t all_columns = work.all_columns > 0 ? work.all_columns : work.columns;
  const bool is_ignored = of_all == work.ignore_index, is_target = of_all >= 0 && of_all < all_columns;
  const float cap = work.soft_cap, row_weight = work.weights == nullptr ? 1.0f : work.weights[blockIdx.x];
  const auto value = [&](const Element& element) {
    const float logit = load(element);
    return cap > 0 ? cap * tanhf(logit / cap) : logit;
  };
  const auto over_row = [&](const auto& visit) {
    for (int64_t j = threadIdx.x * kPacket; j < work.columns; j += kCrossEntropyThreads * kPacket) {
      Element elements[kPacket];
      if constexpr (kPacket == 1) {
        elements[0] = logits[j];
      } else {
        load_packet(logits + j, elements);
      }
      visit(j, elements);
    }
  };
  const auto write = [&](int64_t j, const float(&gradients)[kPacket]) {
    Element elements[kPacket];
    uint8_t in_eight[kPacket];
#pragma unroll
    for (int k = 0; k < kPacket; ++k) {
      store(row_weight * gradients[k], elements[k]);
      in_eight[k] = to_fp8<Fp8Format::e5m2>(gradients[k] * kCrossEntropyCodes);
    }
    if constexpr (kPacket == 1) {
      logits[j] = elements[0];
      if (codes != nullptr) codes[j] = in_eight[0];
    } else {
      store_packet(logits + j, elements);
      if (codes != nullptr) store_packet(codes + j, in_eight);
    }
  };
  const auto write_terms = [&](const RowSums& sums, float of_target) {
    if (threadIdx.x == 0) {
      reinterpret_cast<float4*>(work.terms)[blockIdx.x] =
          make_float4(sums.largest, sums.sum, of_target, sums.of_all);
    }
  };
  if (is_ignored) {
    if (work.terms != nullptr) return write_terms(RowSums(), 0);
    if (work.lse == nullptr && threadIdx.x == 0) work.losses[blockIdx.x] = 0;
    if (!work.wants_gradient) return;
    over_row([&](int64_t j, const Element(&)[kPacket]) {
      const float zeros[kPacket] = {};
      write(j, zeros);
    });
    return;
  }
  float lse;
  if (work.lse != nullptr) {
    lse = work.lse[blockIdx.x];
  } else {
    RowSums sums;
    over_row([&](int64_t, const Element(&elements)[kPacket]) {
      float x[kPacket];
#pragma unroll
      for (int k = 0; k < kPacket; ++k) x[k] = value(elements[k]);
      sums.add(x);
    });
    sums = sums_of_block(sums);
    const bool is_here = target >= 0 && target < work.columns;
    const float of_target = is_here ? value(logits[target]) : 0.0f;
    if (work.terms != nullptr) return write_terms(sums, of_target);
    __syncthreads();  // before anything is written
    lse = sums.largest + kLog2 * log2f(sums.sum);
    if (threadIdx.x == 0) {
      const float of_others =
          work.smoothing == 0 ? 0 : work.smoothing * sums.of_all / static_cast<float>(work.columns);
      const float loss = lse - (1.0f - work.smoothing) * of_target - of_others + work.z_loss * lse * lse;
      work.losses[blockIdx.x] = is_target ? row_weight * loss : NAN;
    }
  }
  if (!work.wants_gradient) return;
  const float of_lse = is_target ? 1.0f + 2.0f * work.z_loss * lse : NAN;
  const float of_each = work.smoothing / static_cast<float>(all_columns);
  over_row([&](int64_t j, const Element(&elements)[kPacket]) {
    float gradients[kPacket];
#pragma unroll
    for (int k = 0; k < kPacket; ++k) {
      const float x = value(elements[k]), share = cap > 0 ? x / cap : 0.0f;
      const float of_others = of_lse * fast_exp(x - lse) - of_each;
      const float of_x = j + k == target ? of_others - (1.0f - work.smoothing) : of_others;
      gradients[k] = of_x * (1.0f - share * share);
    }
    write(j, gradients);
  });
}

}  // namespace

void cross_entropy_cuda(const CrossEntropy& work, Stream stream) {
  if (work.rows == 0) return;
  require(work.rows < (int64_t{1} << 31), "a cross entropy of ", work.rows,
          " rows has too many for one launch; take fewer at once");
  with_element(work.type, [&](auto element) {
    using Element = decltype(element);
    const bool is_whole = work.columns % 8 == 0 && is_aligned(work.logits) && is_aligned(work.codes);
    const auto kernel = is_whole ? cross_entropy_kernel<Element, 8> : cross_entropy_kernel<Element, 1>;
    kernel<<<static_cast<unsigned>(work.rows), kCrossEntropyThreads, 0, stream>>>(work);
  });
  check_launch("the cross entropy");
}

}  // namespace pacer::kernels
