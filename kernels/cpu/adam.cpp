// The CPU loop of the Adam kernels: 28 B per parameter in fp32, limited by memory when the clones vectorise.
// The element arithmetic is kernels/math; nothing here rounds.
#include <pacer/kernels/adam.h>

#include <algorithm>
#include <new>

#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

template <AdamStorage kStorage>
struct Range {
  using Types = StorageOf<kStorage>;
  const typename Types::Param* gradient;
  typename Types::Param* parameter;
  typename Types::State* exp_avg;
  typename Types::State* exp_avg_sq;
  typename Types::State* max_exp_avg_sq;
  typename Types::Extra* extra;
  int64_t count;
  int64_t first_element;
};

template <AdamStorage kStorage, bool kAmsgrad>
PACER_HOST_DEVICE void step_element(const Range<kStorage>& range, int64_t i,
                                    const AdamScalars<typename StorageOf<kStorage>::Real>& scalars,
                                    WeightDecay decay_mode, uint32_t random16) {
  StoredElement<kStorage> e;
  e.gradient = range.gradient[i];
  e.parameter = range.parameter[i];
  e.exp_avg = range.exp_avg[i];
  e.exp_avg_sq = range.exp_avg_sq[i];
  if constexpr (kAmsgrad) e.max_exp_avg_sq = range.max_exp_avg_sq[i];
  if constexpr (Range<kStorage>::Types::kHasExtra) e.extra = range.extra[i];
  adam_step<kStorage, kAmsgrad>(e, scalars, decay_mode, random16);
  range.parameter[i] = e.parameter;
  range.exp_avg[i] = e.exp_avg;
  range.exp_avg_sq[i] = e.exp_avg_sq;
  if constexpr (kAmsgrad) range.max_exp_avg_sq[i] = e.max_exp_avg_sq;
  if constexpr (Range<kStorage>::Types::kHasExtra) range.extra[i] = e.extra;
}

template <AdamStorage kStorage, bool kAmsgrad, WeightDecay kDecay>
PACER_TARGET_CLONES void step_range(const Range<kStorage>& r,
                                    const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  const Range<kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const AdamScalars<typename StorageOf<kStorage>::Real> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < range.count; ++i) {
    step_element<kStorage, kAmsgrad>(range, i, scalars, kDecay, 0);
  }
}

constexpr int64_t kDrawsAtOnce = 64;

// random16[8 * d + h] = half-word h of draw first_draw + d, for d < kDrawsAtOnce. The draws are computed as
// four arrays of words, which vectorises, and then interleaved.
PACER_TARGET_CLONES void fill_random16(uint64_t seed, int64_t step, int64_t first_draw, uint16_t* random16) {
  alignas(64) uint32_t words[4][kDrawsAtOnce];
#pragma omp simd
  for (int64_t d = 0; d < kDrawsAtOnce; ++d) {
    const PhiloxCounter draw = rounding_draw(seed, step, first_draw + d);
    words[0][d] = draw.word[0];
    words[1][d] = draw.word[1];
    words[2][d] = draw.word[2];
    words[3][d] = draw.word[3];
  }
#pragma omp simd
  for (int64_t d = 0; d < kDrawsAtOnce; ++d) {
    for (int w = 0; w < 4; ++w) {
      random16[kElementsPerDraw * d + 2 * w] = static_cast<uint16_t>(words[w][d]);
      random16[kElementsPerDraw * d + 2 * w + 1] = static_cast<uint16_t>(words[w][d] >> 16);
    }
  }
}

template <bool kAmsgrad, WeightDecay kDecay>
PACER_TARGET_CLONES void step_block(const Range<AdamStorage::bf16_stochastic>& r, const AdamScalars<float>& s,
                                    int64_t begin, int64_t end, const uint16_t* random16) {
  const Range<AdamStorage::bf16_stochastic> range = r;
  const AdamScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    step_element<AdamStorage::bf16_stochastic, kAmsgrad>(range, i, scalars, kDecay, random16[i - begin]);
  }
}

template <bool kAmsgrad, WeightDecay kDecay>
void step_range_stochastic(const Range<AdamStorage::bf16_stochastic>& range,
                           const AdamScalars<float>& scalars) {
  constexpr int64_t kBlock = kDrawsAtOnce * kElementsPerDraw;
  uint16_t random16[kBlock];
  for (int64_t begin = 0; begin < range.count;) {
    const int64_t real_index = range.first_element + begin;
    const int64_t skipped = real_index % kElementsPerDraw;
    const int64_t end = std::min(range.count, begin + kBlock - skipped);
    fill_random16(scalars.seed, scalars.step, real_index / kElementsPerDraw, random16);
    step_block<kAmsgrad, kDecay>(range, scalars, begin, end, random16 + skipped);
    begin = end;
  }
}

template <AdamStorage kStorage, bool kAmsgrad>
void step_tile(const Tile& tile, const AdamTensor& tensor, const void* gradient,
               const void* scalars_pointer) {
  using Types = StorageOf<kStorage>;
  const auto& scalars = *static_cast<const AdamScalars<typename Types::Real>*>(scalars_pointer);
  if (scalars.skip) return;
  Range<kStorage> range{};
  range.gradient = static_cast<const typename Types::Param*>(gradient) + tile.offset;
  range.parameter = static_cast<typename Types::Param*>(tensor.parameter) + tile.offset;
  range.exp_avg = static_cast<typename Types::State*>(tensor.exp_avg) + tile.offset;
  range.exp_avg_sq = static_cast<typename Types::State*>(tensor.exp_avg_sq) + tile.offset;
  if constexpr (kAmsgrad) {
    range.max_exp_avg_sq = static_cast<typename Types::State*>(tensor.max_exp_avg_sq) + tile.offset;
  }
  if constexpr (Types::kHasExtra)
    range.extra = static_cast<typename Types::Extra*>(tensor.extra) + tile.offset;
  range.count = tile.count;
  range.first_element = tensor.first_element + tile.offset;

  const auto run = [&](auto decay) {
    if constexpr (kStorage == AdamStorage::bf16_stochastic) {
      step_range_stochastic<kAmsgrad, decay()>(range, scalars);
    } else {
      step_range<kStorage, kAmsgrad, decay()>(range, scalars);
    }
  };
  switch (scalars.decay_mode) {
    case WeightDecay::none:
      return run(std::integral_constant<WeightDecay, WeightDecay::none>{});
    case WeightDecay::l2:
      return run(std::integral_constant<WeightDecay, WeightDecay::l2>{});
    case WeightDecay::decoupled:
      return run(std::integral_constant<WeightDecay, WeightDecay::decoupled>{});
  }
}

template <class Real>
void write_scalars(const AdamSlot& slot, int64_t step, void* scalars) {
  new (scalars) AdamScalars<Real>(adam_scalars<Real>(slot.settings, step));
}

}  // namespace

void adam_scalars_cpu(const AdamSlot& slot, int64_t step, void* scalars) {
  const FullDenormals full_denormals;
  slot.is_double ? write_scalars<double>(slot, step, scalars) : write_scalars<float>(slot, step, scalars);
}

void adam_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors, const AdamGradient* gradients,
              const void* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  const void* slot = static_cast<const char*>(scalars) + gradient.scalars * kAdamScalarsBytes;
  with_storage(launch.storage, [&](auto storage) {
    const auto step = launch.amsgrad ? step_tile<storage(), true> : step_tile<storage(), false>;
    step(tile, tensors[tile.tensor], gradient.gradient, slot);
  });
}

}  // namespace pacer::kernels
