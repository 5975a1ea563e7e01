// The CUDA loops of 1-bit Adam after the freeze. Bytes per element with fp32 gradients: compression 12.25 (20
// in the first step after a dense one), update 12.13; a refresh reads and writes momentum and variance and
// reads gradients, 20.
#include <pacer/kernels/onebit_adam.h>

#include <pacer/kernels/cuda/onebit_tiles.cuh>

namespace pacer::kernels {
namespace {

template <class Element>
__device__ __forceinline__ void load_gradient(const void* gradient, int first, int real,
                                              float (&values)[kMine]) {
  const Element* elements = static_cast<const Element*>(gradient) + first;
  if (first + kMine <= real && is_packet_aligned<Element, kMine>(elements)) {
    Element packet[kMine];
    load_packet(elements, packet);
#pragma unroll
    for (int k = 0; k < kMine; ++k) values[k] = load(packet[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kMine; ++k) values[k] = first + k < real ? load(elements[k]) : 0.0f;
  }
}

__device__ __forceinline__ void load_gradient_of(AdamStorage storage, const void* gradient, int first,
                                                 int real, float (&values)[kMine]) {
  switch (storage) {
    case AdamStorage::f16_master:
      return load_gradient<Float16>(gradient, first, real, values);
    case AdamStorage::bf16_master:
    case AdamStorage::bf16_remainder:
    case AdamStorage::bf16_correction:
      return load_gradient<BFloat16>(gradient, first, real, values);
    default:
      return load_gradient<float>(gradient, first, real, values);
  }
}

__device__ __forceinline__ int64_t gradient_bytes(AdamStorage storage) {
  return storage == AdamStorage::f32 ? 4 : 2;
}

// beta1 * m + (1 - beta1) * g. kMayBeDense: the momentum is what the status says, else bits. kIsF32: so are
// all tensors. kIsScaled: it travels multiplied with its tensor's momentum scale.
template <bool kMayBeDense, bool kIsF32, bool kIsScaled>
struct MomentumSource {
  OneBitAdamWork work;
  OneBitControl control;

  static constexpr int kBlocks = kMayBeDense ? 2 : 3, kRowsAtOnce = 2;
  using Kept = NothingKept;
  __device__ __forceinline__ Kept begin() const { return {}; }
  struct Granule {
    const void* gradient;        // of its first element; null: none
    const unsigned char* signs;  // null: the momentum is dense
    const float* dense;
    float scale;
    float beta1, one_minus_beta1, factor;
    float momentum_scale;
    AdamStorage storage;
  };
  struct Raw {
    float gradient[kMine];
    float momentum[kMayBeDense ? kMine : 1];
    uint32_t nibble;
  };

  __device__ __forceinline__ Granule granule(uint32_t number, int64_t position) const {
    const OneBitAdamTensor& tensor = work.tensors[number];
    const MomentScalars<float>& scalars = work.moments_of(tensor);
    Granule granule{};
    if constexpr (kIsScaled) granule.momentum_scale = work.momentum_scales[number];
    granule.storage = tensor.storage;
    if (tensor.gradient != nullptr) {
      granule.gradient = static_cast<const char*>(tensor.gradient) +
                         (position - tensor.begin) * gradient_bytes(tensor.storage);
    }
    granule.beta1 = scalars.beta1;
    granule.one_minus_beta1 = scalars.one_minus_beta1;
    granule.factor = scalars.factor;
    if (kMayBeDense && momentum_is_dense(work, control)) {
      granule.dense = work.dense_momentum + position;
    } else {
      const SignedGranule bits = signed_granule(work.bits, position);
      granule.signs = bits.signs;
      granule.scale = kIsScaled ? div_(bits.scale, granule.momentum_scale) : bits.scale;
    }
    return granule;
  }
  __device__ __forceinline__ Raw fetch(const Granule& granule, int real, int lane) const {
    Raw raw{};
    if constexpr (kMayBeDense) {
      if (granule.signs == nullptr) load_packet(granule.dense + lane * kMine, raw.momentum);
    }
    if (!kMayBeDense || granule.signs != nullptr) raw.nibble = nibble_of(granule.signs, lane);
    if (granule.gradient != nullptr) {
      if constexpr (kIsF32) {
        load_gradient<float>(granule.gradient, lane * kMine, real, raw.gradient);
      } else {
        load_gradient_of(granule.storage, granule.gradient, lane * kMine, real, raw.gradient);
      }
    }
    return raw;
  }
  __device__ __forceinline__ void read(const Kept&, const Granule& granule, const Raw& raw, int, int64_t,
                                       float (&values)[kMine]) const {
    MomentScalars<float> scalars;
    scalars.beta1 = granule.beta1;
    scalars.one_minus_beta1 = granule.one_minus_beta1;
    scalars.factor = granule.factor;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      float momentum = decode_sign((raw.nibble >> k) & 1u, granule.scale);
      if constexpr (kMayBeDense) momentum = granule.signs == nullptr ? raw.momentum[k] : momentum;
      values[k] = onebit_momentum(raw.gradient[k], momentum, scalars);
      if constexpr (kIsScaled) values[k] = mul_(values[k], granule.momentum_scale);
    }
  }
};

// ---- By tiles of one dtype set: four elements a thread. ----

template <AdamStorage kStorage>
__global__ void __launch_bounds__(kTileThreads)
    dense_momentum_kernel(const AdamTiles table, const OneBitAdamWork work, float* momentum, bool refresh,
                          const OneBitControl control) {
  using Element = typename StorageOf<kStorage>::Param;
  const auto [tile, index, lane] = my_tile<kTileThreads>(table);
  const int first = lane * kMine, count = min(kMine, static_cast<int>(tile.count) - first);
  if (count <= 0 || stands_still(control)) return;
  const int64_t position = tile.offset + first;
  const OneBitAdamTensor& tensor = work.tensors[tile.tensor];
  const MomentScalars<float>& scalars = work.moments_of(tensor);
  Element gradient[kMine] = {};
  if (tensor.gradient != nullptr) {
    load_mine(static_cast<const Element*>(tensor.gradient) + (position - tensor.begin), count, gradient);
  }
  float values[kMine], variance[kMine];
  if (momentum_is_dense(work, control)) {
    load_mine(work.dense_momentum + position, count, values);
  } else {
    decode_mine(work.bits, position, lane, momentum_scale_of(work, tile.tensor), values);
  }
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    if (!scalars.skip) values[k] = onebit_momentum(load(gradient[k]), values[k], scalars);
  }
  store_mine(momentum + position, count, values);
  if (!refresh || scalars.skip) return;
  load_mine(work.variance + position, count, variance);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    variance[k] = refreshed_variance(load(gradient[k]), variance[k], scalars, tensor.refresh);
  }
  store_mine(work.variance + position, count, variance);
}

// Every load is issued before the first is used, and without a branch in between where four elements lie in
// one packet. State lies in flat buffers, where there is padding behind a tensor's last element.
template <AdamStorage kStorage, bool kDense>
__global__ void __launch_bounds__(kTileThreads)
    onebit_update_kernel(const AdamTiles table, const OneBitAdamWork work, const OneBitControl control) {
  using Types = StorageOf<kStorage>;
  const auto [tile, index, lane] = my_tile<kTileThreads>(table);
  const int first = lane * kMine, count = min(kMine, static_cast<int>(tile.count) - first);
  if (count <= 0) return;
  const int64_t position = tile.offset + first;
  float variance[kMine], momentum[kMine], scale = 0;
  uint32_t nibble = 0;
  load_packet<float, kMine>(work.variance + position, variance);
  if constexpr (kDense) {
    load_packet(work.dense_momentum + position, momentum);
  } else {
    const int place = lane % kWarp;
    const SignedGranule granule = signed_granule(work.bits, position - place * kMine);
    nibble = nibble_of(granule.signs, place);
    scale = granule.scale;
  }
  const OneBitAdamTensor& tensor = work.tensors[tile.tensor];
  const AdamScalars<float>& scalars = work.scalars_of(tensor);
  const FrozenBounds bounds = work.bounds_of(tile.tensor);
  auto* parameters = static_cast<typename Types::Param*>(tensor.parameter) + (position - tensor.begin);
  auto* extras = static_cast<typename Types::Extra*>(tensor.master_or_remainder);
  typename Types::Param parameter[kMine];
  typename Types::Extra extra[kMine];
  load_mine(parameters, count, parameter);
  if constexpr (Types::kHasExtra) {
    extras += position - tensor.begin;
    load_mine(extras, count, extra);
  }
  if (stands_still(control) || scalars.skip) return;
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    if constexpr (!kDense) momentum[k] = decode_sign((nibble >> k) & 1u, scale);
    StoredElement<kStorage> e{};
    e.parameter = parameter[k];
    if constexpr (Types::kHasExtra) e.extra = extra[k];
    store_parameter(frozen_step(load_parameter(e), momentum[k], variance[k], bounds, scalars), 0, e);
    parameter[k] = e.parameter;
    if constexpr (Types::kHasExtra) extra[k] = e.extra;
  }
  store_mine(parameters, count, parameter);
  if constexpr (Types::kHasExtra) store_mine(extras, count, extra);
}

}  // namespace

void onebit_compress_momentum_cuda(const OneBitCudaSide& side, const OneBitAdamWork& work,
                                   OneBitStorage storage, const OneBitControl& control, Stream stream) {
  const auto with = [](bool value, const auto& visit) {
    value ? visit(std::true_type{}) : visit(std::false_type{});
  };
  with(work.dense_momentum != nullptr, [&](auto may_be_dense) {
    with(storage.same && storage.storage == AdamStorage::f32, [&](auto is_f32) {
      with(work.momentum_scales != nullptr, [&](auto is_scaled) {
        using Source = MomentumSource<decltype(may_be_dense)::value, decltype(is_f32)::value,
                                      decltype(is_scaled)::value>;
        launch_compress("the compression of momentum", side, Source{work, control}, control, stream);
      });
    });
  });
}

void onebit_dense_momentum_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitAdamWork& work,
                                float* momentum, bool refresh, const OneBitControl& control, Stream stream) {
  const unsigned blocks = blocks_for<kTileThreads>(tiles);
  if (blocks == 0) return;
  with_compressible(storage, [&](auto chosen) {
    dense_momentum_kernel<chosen()>
        <<<blocks, kTileThreads, 0, stream>>>(tiles, work, momentum, refresh, control);
  });
  check_launch("the momentum of 1-bit Adam");
}

void onebit_update_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitAdamWork& work, bool dense,
                        const OneBitControl& control, Stream stream) {
  const unsigned blocks = blocks_for<kTileThreads>(tiles);
  if (blocks == 0) return;
  with_compressible(storage, [&](auto chosen) {
    const auto kernel = dense ? onebit_update_kernel<chosen(), true> : onebit_update_kernel<chosen(), false>;
    kernel<<<blocks, kTileThreads, 0, stream>>>(tiles, work, control);
  });
  check_launch("the update of 1-bit Adam");
}

}  // namespace pacer::kernels
