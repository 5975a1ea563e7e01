// The CUDA loop over groups of elements whose moments lie in memory as codes, for a rule of two moments and a format such as
// that of math/moment_codes.h. Tiles are those of element_loop.cuh; the threads of a group, 4 neighbours of a warp, find
// its largest moments together. Each stream is moved once. Deterministic: the largest of a group does not depend on an
// order. Compile it with --fmad=false.
#pragma once

#include <pacer/kernels/cuda/coded_packet.cuh>

namespace pacer::kernels {

template <class Rule, class Format, AdamStorage kStorage>
__global__ void __launch_bounds__(kCodedThreads<kStorage>)
    coded_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                 const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars) {
  constexpr int kMine = kCodedPacket;
  constexpr int kLanes = Format::kGroup / kMine;
  using Packet = CodedPacket<Format, kStorage, kMine>;

  // A warp has one tile, so that all its threads leave together or none.
  const auto [tile, index, lane] = my_tile<kCodedThreads<kStorage>>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int tile_count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  const int64_t first = tile.offset + lane * kMine;
  const int count = min(max(tile_count - lane * kMine, 0), kMine);
  const bool whole = count == kMine && Packet::is_aligned(tensor, gradient.gradient);
  auto* const exp_avg_scale = static_cast<Float16*>(tensor.exp_avg_scale) + first / Format::kGroup;
  auto* const exp_avg_sq_scale = static_cast<Float16*>(tensor.exp_avg_sq_scale) + first / Format::kGroup;
  Packet packet;
  Float16 scale{}, scale_sq{};
  if (count > 0) {
    packet.load(tensor, gradient.gradient, first, count, whole);
    scale = *exp_avg_scale;
    scale_sq = *exp_avg_sq_scale;
  }

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (tile_count == 0) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<float>>();
  if (scalars.skip) return;

  uint32_t random16[kMine] = {};
  draw_random16<kStorage, kMine>(scalars, tensor.first_element + first, random16);
  const typename Format::First was(scale);
  const typename Format::Second was_sq(scale_sq);
  float exp_avg[kMine], exp_avg_sq[kMine];
  uint32_t largest = 0, largest_sq = 0;
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    StoredElement<kStorage> stored = packet.element(k);
    AdamElement<float> e;
    e.gradient = load(packet.gradient[k]);
    e.parameter = load_parameter(stored);
    e.exp_avg = was.decode(packet.exp_avg[k]);
    e.exp_avg_sq = was_sq.decode(packet.exp_avg_sq[k]);
    Rule::step(e, scalars);
    store_parameter(e.parameter, random16[k], stored);
    packet.set_element(k, stored);
    exp_avg[k] = e.exp_avg;
    exp_avg_sq[k] = e.exp_avg_sq;
    largest = max(largest, Format::First::measure(e.exp_avg));
    largest_sq = max(largest_sq, Format::Second::measure(e.exp_avg_sq));
  }
  scale = Format::scale(largest_of_group<kLanes>(largest));
  scale_sq = Format::scale(largest_of_group<kLanes>(largest_sq));
  const typename Format::First now(scale);
  const typename Format::Second now_sq(scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    packet.exp_avg[k] = now.encode(exp_avg[k]);
    packet.exp_avg_sq[k] = now_sq.encode(exp_avg_sq[k]);
  }
  if (count == 0) return;
  packet.store(tensor, first, count, whole);
  if (lane % kLanes == 0) {
    *exp_avg_scale = scale;
    *exp_avg_sq_scale = scale_sq;
  }
}

// Does what elements_cuda does, for a format of moments and every dtype set but fp64.
template <class Rule, class Format>
void coded_cuda(const char* what, AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
                const AdamGradient* gradients, const StepScalars* scalars, cudaStream_t stream) {
  with_storage(choice.storage, [&](auto storage) {
    if constexpr (storage() == AdamStorage::f64) {
      require(false, "the moments of fp64 parameters have no codes");
    } else {
      constexpr int kThreads = kCodedThreads<storage()>;
      const unsigned blocks = blocks_for<kThreads>(tiles);
      if (blocks == 0) return;
      launch_overlapped(what, choice.follows_prologue, coded_kernel<Rule, Format, storage()>, blocks,
                        kThreads, stream, tiles, tensors, gradients, scalars);
    }
  });
}

}  // namespace pacer::kernels
