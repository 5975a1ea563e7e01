// Adam in the CPU loop of element_loop.h: 28 B per parameter in fp32. Also the scalars of every rule.
#include <pacer/kernels/adam.h>

#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {
namespace {

// The rule with where weight decay enters as a constant of the loop.
template <bool kAmsgrad, WeightDecay kDecay>
struct AdamWith : AdamRule<kAmsgrad> {
  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    adam_step<Real, kAmsgrad>(e, s, kDecay);
  }
};

template <AdamStorage kStorage, bool kAmsgrad>
void step_tile_of_adam(const Tile& tile, const AdamTensor& tensor, const void* gradient,
                       const StepScalars& of_step) {
  const auto& scalars = of_step.as<AdamScalars<typename StorageOf<kStorage>::Real>>();
  if (scalars.skip) return;
  const auto run = [&](auto decay) {
    step_tile<AdamWith<kAmsgrad, decay()>, kStorage>(tile, tensor, gradient, scalars);
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
    const auto step =
        launch.amsgrad ? step_tile_of_adam<storage(), true> : step_tile_of_adam<storage(), false>;
    step(tile, tensors[tile.tensor], gradient.gradient, scalars[gradient.scalars]);
  });
}

}  // namespace pacer::kernels
