// The CUDA loops of Muon's momentum in 8 bits. Each thread has 8 elements, and the 4 neighbours of a warp that share a group
// find its largest momentum together. For directions 2 or 4 bytes of gradient and 1.0625 of momentum are read, and the
// direction is written; for the momentum the same is read, and 1.0625 bytes are written. Deterministic: the largest of a
// group does not depend on an order.
#include <pacer/kernels/muon_8bit.h>

#include <pacer/kernels/math/moment_codes.h>
#include <pacer/kernels/math/muon.h>
#include <pacer/kernels/cuda/coded_packet.cuh>

namespace pacer::kernels {
namespace {

using Codes = EightBitMoments;
constexpr int kThreads = 128;
constexpr int kMine = kCodedPacket;
constexpr int kLanes = Codes::kGroup / kMine;  // that share a group

// Tiles are those of adam_cuda: a block or a warp goes over its tile in a loop. Without directions the momentum changes.
template <class Param, class Direction>
__global__ void __launch_bounds__(kThreads)
    coded_momentum_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                          const AdamGradient* __restrict__ gradients, void* const* __restrict__ directions,
                          bool nesterov, const StepScalars* group_scalars) {
  // A block or a warp has one tile, so that all its threads leave together or none.
  const auto [tile, index, lane] = my_tile<kThreads>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  if (tile.count == 0 || gradient.gradient == nullptr) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<float>>();
  if (scalars.skip) return;
  const int threads = index < table.block_tiles ? kThreads : kWarp;
  const auto* const own_gradient = static_cast<const Param*>(gradient.gradient);
  auto* const exp_avg = static_cast<int8_t*>(tensors[tile.tensor].exp_avg);
  auto* const scales = static_cast<Float16*>(tensors[tile.tensor].exp_avg_scale);
  auto* const direction = directions == nullptr ? nullptr : static_cast<Direction*>(directions[tile.tensor]);
  const bool aligned = is_packet_aligned<Param, kMine>(own_gradient) &&
                       is_packet_aligned<int8_t, kMine>(static_cast<const int8_t*>(exp_avg)) &&
                       is_packet_aligned<Direction, kMine>(static_cast<const Direction*>(direction));
  const int elements = static_cast<int>(tile.count);
#pragma unroll 1
  for (int row = 0; row < elements; row += threads * kMine) {
    const int place = row + lane * kMine;
    const int64_t first = tile.offset + place;
    const int count = min(max(elements - place, 0), kMine);
    const bool whole = count == kMine && aligned;
    Param g[kMine];
    int8_t code[kMine];
    Float16 scale{};
    load_up_to(own_gradient + first, count, whole, g);
    load_up_to(static_cast<const int8_t*>(exp_avg) + first, count, whole, code);
    if (count > 0) scale = scales[first / Codes::kGroup];
    const Codes::First was(scale);
    float momentum[kMine];
    Direction d[kMine];
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      momentum[k] = was.decode(code[k]);
      store(muon_direction(load(g[k]), nesterov, scalars, momentum[k]), d[k]);
      largest = max(largest, Codes::First::measure(momentum[k]));
    }
    if (directions != nullptr) {
      if (count > 0) store_up_to(direction + first, count, whole, d);
      continue;
    }
    const Float16 fresh = Codes::First::scale_of(largest_of_group<kLanes>(largest));
    const Codes::First now(fresh);
#pragma unroll
    for (int k = 0; k < kMine; ++k) code[k] = now.encode(momentum[k]);
    if (count == 0) continue;
    store_up_to(exp_avg + first, count, whole, code);
    if (lane % kLanes == 0) scales[first / Codes::kGroup] = fresh;
  }
}

}  // namespace

void muon_8bit_momentum_cuda(MuonLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                             const AdamGradient* gradients, void* const* directions,
                             const StepScalars* scalars, Stream stream) {
  const unsigned blocks = blocks_for<kThreads>(tiles);
  if (blocks == 0) return;
  with_storage(launch.storage, [&](auto chosen) {
    using Param = typename StorageOf<chosen()>::Param;
    const auto run = [&](auto kernel) {
      kernel<<<blocks, kThreads, 0, stream>>>(tiles, tensors, gradients, directions, launch.nesterov,
                                              scalars);
    };
    if constexpr (chosen() == AdamStorage::f64) {
      require(false, "the momentum of fp64 parameters has no codes in 8 bits");
    } else if (launch.type == DirectionType::bf16) {
      run(coded_momentum_kernel<Param, BFloat16>);
    } else {
      run(coded_momentum_kernel<Param, float>);
    }
  });
  check_launch("the momentum of Muon in 8 bits");
}

}  // namespace pacer::kernels
