// Adam in the CPU loop of element_loop.h: 28 B per parameter in fp32. Also the scalars of every rule, and the
// random bits of stochastic rounding.
#include <pacer/kernels/adam.h>

#include <pacer/kernels/cpu/adam_decay.h>
#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {
namespace {

template <AdamStorage kStorage, bool kAmsgrad>
void step_tile_of_adam(const Tile& tile, const AdamTensor& tensor, const void* gradient,
                       const StepScalars& of_step) {
  const auto& scalars = of_step.as<AdamScalars<typename StorageOf<kStorage>::Real>>();
  if (scalars.skip) return;
  with_decay<kAmsgrad>(scalars.decay_mode, [&](auto rule) {
    step_tile<decltype(rule), kStorage>(tile, tensor, gradient, scalars);
  });
}

template <class Real>
void write_scalars(const StepGroup& group, int64_t step, StepScalars& scalars, AverageWeights& average) {
  const auto write = [&](auto value) {
    value.skip = !group.active;
    scalars.set(value);
  };
  switch (group.settings.rule) {
    case UpdateRule::adam:
      return write(adam_scalars<Real>(group.settings, step));
    case UpdateRule::lamb:
      return write(lamb_scalars<Real>(group.settings, step));
    case UpdateRule::schedule_free:
      return write(schedule_free_scalars<Real>(group.settings, step, average));
  }
}

}  // namespace

// The draws are computed as four arrays of words, which vectorises, and then interleaved.
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
    for (int64_t w = 0; w < 4; ++w) {
      random16[kElementsPerDraw * d + 2 * w] = static_cast<uint16_t>(words[w][d]);
      random16[kElementsPerDraw * d + 2 * w + 1] = static_cast<uint16_t>(words[w][d] >> 16);
    }
  }
}

void adam_scalars_cpu(const StepGroup& group, int64_t step, StepScalars& scalars, AverageWeights& average) {
  const FullDenormals full_denormals;
  group.is_double ? write_scalars<double>(group, step, scalars, average)
                  : write_scalars<float>(group, step, scalars, average);
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
