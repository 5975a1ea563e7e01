// Muon's loops on a GPU. Momentum: each thread has a packet of elements, loads, computes and stores it, as in
// element_loop.cuh. The update is a rule of that file.
#include <pacer/kernels/muon.h>

#include <type_traits>

#include <pacer/kernels/math/muon.h>
#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {
namespace {

constexpr int kThreads = 128;

template <AdamStorage kStorage, class Direction, int N>
__device__ __forceinline__ void momentum_of_packet(const void* gradients, void* exp_avg, Direction* direction,
                                                   int64_t i, bool nesterov,
                                                   const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  using Types = StorageOf<kStorage>;
  typename Types::Param g[N];
  typename Types::State m[N];
  Direction d[N];
  load_some(static_cast<const typename Types::Param*>(gradients) + i, g);
  load_some(static_cast<const typename Types::State*>(exp_avg) + i, m);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    typename Types::Real momentum = load(m[k]);
    store(muon_direction<typename Types::Real>(load(g[k]), nesterov, s, momentum), d[k]);
    store(momentum, m[k]);
  }
  if (direction == nullptr) {
    store_some(static_cast<typename Types::State*>(exp_avg) + i, m);
  } else {
    store_some(direction + i, d);
  }
}

// Tiles are those of adam_cuda: a block's share is what its threads there take at once, so that a block here,
// which may have more or fewer threads, goes over it in a loop.
template <AdamStorage kStorage, class Direction>
__global__ void __launch_bounds__(kThreads)
    momentum_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                    const AdamGradient* __restrict__ gradients, void* const* __restrict__ directions,
                    bool nesterov, const StepScalars* group_scalars) {
  using Types = StorageOf<kStorage>;
  constexpr int N = 4;
  const auto [tile, index, lane] = my_tile<kThreads>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  if (tile.count == 0 || gradient.gradient == nullptr) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<typename Types::Real>>();
  if (scalars.skip) return;
  const int threads = index < table.block_tiles ? kThreads : kWarp;
  void* const exp_avg = tensors[tile.tensor].exp_avg;
  auto* const direction = directions == nullptr ? nullptr : static_cast<Direction*>(directions[tile.tensor]);
  const bool aligned =
      is_packet_aligned<typename Types::Param, N>(
          static_cast<const typename Types::Param*>(gradient.gradient)) &&
      is_packet_aligned<typename Types::State, N>(static_cast<const typename Types::State*>(exp_avg)) &&
      is_packet_aligned<Direction, N>(direction);
  const int count = static_cast<int>(tile.count);
  for (int first = lane * N; first < count; first += threads * N) {
    const int64_t i = tile.offset + first;
    if (aligned && first + N <= count) {
      momentum_of_packet<kStorage, Direction, N>(gradient.gradient, exp_avg, direction, i, nesterov, scalars);
      continue;
    }
    for (int k = 0; k < N && first + k < count; ++k) {
      momentum_of_packet<kStorage, Direction, 1>(gradient.gradient, exp_avg, direction, i + k, nesterov,
                                                 scalars);
    }
  }
}

// A block for each matrix.
template <class Real>
__global__ void rows_kernel(bool stores, Real one_minus_beta, const MuonRows* __restrict__ rows,
                            const AdamGradient* __restrict__ gradients, const StepScalars* scalars) {
  const MuonRows own = rows[blockIdx.x];
  const AdamGradient gradient = gradients[own.matrix];
  if (gradient.gradient == nullptr || scalars[gradient.scalars].template as<AdamScalars<Real>>().skip) return;
  auto* const moments = static_cast<Real*>(own.moments);
  auto* const fresh = static_cast<Real*>(own.fresh);
  for (int64_t r = threadIdx.x; r < own.count; r += blockDim.x) {
    if (stores) {
      moments[r] = fresh[r];
    } else {
      fresh[r] = muon_row_moment(fresh[r], one_minus_beta, moments[r]);
    }
  }
}

}  // namespace

void muon_rows_cuda(MuonRowsLaunch launch, const MuonRows* rows, int64_t count, const AdamGradient* gradients,
                    const StepScalars* scalars, Stream stream) {
  if (count == 0) return;
  const auto run = [&](auto real) {
    using Real = decltype(real);
    rows_kernel<Real><<<static_cast<unsigned>(count), kThreads, 0, stream>>>(
        launch.stores, static_cast<Real>(1 - launch.beta), rows, gradients, scalars);
  };
  launch.storage == AdamStorage::f64 ? run(double{}) : run(float{});
  check_launch("the row moments of Muon");
}

void muon_momentum_cuda(MuonLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                        const AdamGradient* gradients, void* const* directions, const StepScalars* scalars,
                        Stream stream) {
  const unsigned blocks = blocks_for<kThreads>(tiles);
  if (blocks == 0) return;
  with_storage(launch.storage, [&](auto chosen) {
    const auto run = [&](auto kernel) {
      kernel<<<blocks, kThreads, 0, stream>>>(tiles, tensors, gradients, directions, launch.nesterov,
                                              scalars);
    };
    if constexpr (chosen() == AdamStorage::f64) {
      run(momentum_kernel<chosen(), double>);
    } else if (launch.type == DirectionType::bf16) {
      run(momentum_kernel<chosen(), BFloat16>);
    } else {
      run(momentum_kernel<chosen(), float>);
    }
  });
  check_launch("the momentum of Muon");
}

void muon_update_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                      const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<MuonUpdate<false>, /*kHasRows=*/false>("the Muon update", launch, tiles, tensors, gradients,
                                                       scalars, stream);
}

void cautious_muon_update_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                               const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<MuonUpdate<true>, /*kHasRows=*/false>("the Muon update", launch, tiles, tensors, gradients,
                                                      scalars, stream);
}

}  // namespace pacer::kernels
