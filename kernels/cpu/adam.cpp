// The CPU loop of the Adam kernels: 28 B per parameter in fp32, limited by memory when the clones vectorise.
// The element arithmetic is kernels/math; nothing here rounds.
#include <pacer/kernels/adam.h>

#include <pacer/kernels/cpu/adam_range.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

template <AdamStorage kStorage, bool kAmsgrad>
PACER_HOST_DEVICE void step_element(const AdamRange<kStorage>& range, int64_t i,
                                    const AdamScalars<typename StorageOf<kStorage>::Real>& scalars,
                                    WeightDecay decay_mode, uint32_t random16) {
  StoredElement<kStorage> e;
  e.gradient = range.gradient[i];
  e.parameter = range.parameter[i];
  e.exp_avg = range.exp_avg[i];
  e.exp_avg_sq = range.exp_avg_sq[i];
  if constexpr (kAmsgrad) e.max_exp_avg_sq = range.max_exp_avg_sq[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) e.extra = range.extra[i];
  adam_step<kStorage, kAmsgrad>(e, scalars, decay_mode, random16);
  range.parameter[i] = e.parameter;
  range.exp_avg[i] = e.exp_avg;
  range.exp_avg_sq[i] = e.exp_avg_sq;
  if constexpr (kAmsgrad) range.max_exp_avg_sq[i] = e.max_exp_avg_sq;
  if constexpr (StorageOf<kStorage>::kHasExtra) range.extra[i] = e.extra;
}

template <AdamStorage kStorage, bool kAmsgrad, WeightDecay kDecay>
PACER_TARGET_CLONES void step_range(const AdamRange<kStorage>& r,
                                    const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  const AdamRange<kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const AdamScalars<typename StorageOf<kStorage>::Real> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < range.count; ++i) {
    step_element<kStorage, kAmsgrad>(range, i, scalars, kDecay, 0);
  }
}

template <bool kAmsgrad, WeightDecay kDecay>
PACER_TARGET_CLONES void step_block(const AdamRange<AdamStorage::bf16_stochastic>& r,
                                    const AdamScalars<float>& s, int64_t begin, int64_t end,
                                    const uint16_t* random16) {
  const AdamRange<AdamStorage::bf16_stochastic> range = r;
  const AdamScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    step_element<AdamStorage::bf16_stochastic, kAmsgrad>(range, i, scalars, kDecay, random16[i - begin]);
  }
}

template <AdamStorage kStorage, bool kAmsgrad>
void step_tile(const Tile& tile, const AdamTensor& tensor, const void* gradient, const StepScalars& of_step) {
  const auto& scalars = of_step.as<AdamScalars<typename StorageOf<kStorage>::Real>>();
  if (scalars.skip) return;
  const AdamRange<kStorage> range = range_of<kStorage>(tile, tensor, gradient);
  const auto run = [&](auto decay) {
    if constexpr (kStorage == AdamStorage::bf16_stochastic) {
      for_each_drawn_block(range, scalars, [&](int64_t begin, int64_t end, const uint16_t* random16) {
        step_block<kAmsgrad, decay()>(range, scalars, begin, end, random16);
      });
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
void write_scalars(const StepGroup& group, int64_t step, StepScalars& scalars) {
  const auto write = [&](auto value) {
    value.skip = !group.active;
    scalars.set(value);
  };
  group.settings.rule == UpdateRule::lamb ? write(lamb_scalars<Real>(group.settings, step))
                                          : write(adam_scalars<Real>(group.settings, step));
}

}  // namespace

void adam_scalars_cpu(const StepGroup& group, int64_t step, StepScalars& scalars) {
  const FullDenormals full_denormals;
  group.is_double ? write_scalars<double>(group, step, scalars) : write_scalars<float>(group, step, scalars);
}

void replace_factor_cpu(const StepScalars* scalars, int64_t count, double factor, StepScalars* replaced) {
  for (int64_t i = 0; i < count; ++i) replaced[i] = with_factor(scalars[i], factor);
}

void adam_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors, const AdamGradient* gradients,
              const StepScalars* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto storage) {
    const auto step = launch.amsgrad ? step_tile<storage(), true> : step_tile<storage(), false>;
    step(tile, tensors[tile.tensor], gradient.gradient, scalars[gradient.scalars]);
  });
}

}  // namespace pacer::kernels
