// Adam in the CUDA loop of element_loop.cuh, and the scalars of every rule.
#include <pacer/kernels/adam.h>

#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {
namespace {

constexpr int kPrologueThreads = 32;

// One thread per step group. The update may start loading meanwhile.
__global__ void prologue_kernel(const StepGroup* groups, int64_t count, StepCount* counts,
                                StepScalars* scalars, const GradientCheck* check) {
  let_next_kernel_start();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  StepGroup group = groups[i];
  const bool skip = !group.active || (check != nullptr && check->non_finite != 0);
  if (check != nullptr) {
    group.settings.factor = mul_(check->factor, group.settings.factor);
    if (group.clip != nullptr) group.settings.factor = mul_(group.settings.factor, *group.clip);
  }
  StepCount reached = counts[i];
  ++reached.steps;
  const auto write = [&](auto value) {
    value.skip = skip;
    scalars[i].set(value);
  };
  const auto write_all = [&](auto real) {
    using Real = decltype(real);
    switch (group.settings.rule) {
      case UpdateRule::adam:
        return write(adam_scalars<Real>(group.settings, reached.steps));
      case UpdateRule::lamb:
        return write(lamb_scalars<Real>(group.settings, reached.steps));
      case UpdateRule::schedule_free:
        return write(schedule_free_scalars<Real>(group.settings, reached.steps, reached.average));
    }
  };
  group.is_double ? write_all(double{}) : write_all(float{});
  if (!skip) counts[i] = reached;
}

__global__ void factor_kernel(const StepScalars* scalars, int64_t count, const double* factor,
                              StepScalars* replaced) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) replaced[i] = with_factor(scalars[i], *factor);
}

}  // namespace

int64_t adam_cuda_block_tile(AdamStorage storage) {
  return with_storage(
      storage, [](auto chosen) -> int64_t { return ElementPolicy<chosen()>::kThreads * kPacket<chosen()>; });
}
int64_t adam_cuda_warp_tile(AdamStorage storage) {
  return with_storage(storage, [](auto chosen) -> int64_t { return kWarp * kPacket<chosen()>; });
}

void adam_cuda(AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  const auto run = choice.amsgrad ? elements_cuda<AdamRule<true>> : elements_cuda<AdamRule<false>>;
  run("the Adam update", choice, tiles, tensors, gradients, scalars, stream);
}

void adam_prologue_cuda(const StepGroup* groups, int64_t count, StepCount* counts, StepScalars* scalars,
                        const GradientCheck* check, Stream stream) {
  if (count == 0) return;
  prologue_kernel<<<static_cast<unsigned>(ceil_divide(count, kPrologueThreads)), kPrologueThreads, 0,
                    stream>>>(groups, count, counts, scalars, check);
  check_launch("the Adam prologue");
}

void replace_factor_cuda(const StepScalars* scalars, int64_t count, const double* factor,
                         StepScalars* replaced, Stream stream) {
  if (count == 0) return;
  factor_kernel<<<static_cast<unsigned>(ceil_divide(count, kPrologueThreads)), kPrologueThreads, 0, stream>>>(
      scalars, count, factor, replaced);
  check_launch("the factor of a step");
}

}  // namespace pacer::kernels
