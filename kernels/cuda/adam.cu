// Adam in the CUDA loop of element_loop.cuh, and the scalars of every rule.
#include <pacer/kernels/adam.h>

#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {
namespace {

constexpr int kPrologueThreads = 32;

// One thread per step group. The update may start loading meanwhile.
__global__ void prologue_kernel(const StepGroup* groups, int64_t count, int64_t* steps, StepScalars* scalars,
                                const GradientCheck* check) {
  let_next_kernel_start();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  StepGroup group = groups[i];
  const bool skip = !group.active || (check != nullptr && check->non_finite != 0);
  if (check != nullptr) group.settings.factor = mul_(check->factor, group.settings.factor);
  const int64_t step = steps[i] + 1;
  if (!skip) steps[i] = step;
  const auto write = [&](auto value) {
    value.skip = skip;
    scalars[i].set(value);
  };
  const bool lamb = group.settings.rule == UpdateRule::lamb;
  if (group.is_double) {
    lamb ? write(lamb_scalars<double>(group.settings, step))
         : write(adam_scalars<double>(group.settings, step));
  } else {
    lamb ? write(lamb_scalars<float>(group.settings, step))
         : write(adam_scalars<float>(group.settings, step));
  }
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

void adam_prologue_cuda(const StepGroup* groups, int64_t count, int64_t* steps, StepScalars* scalars,
                        const GradientCheck* check, Stream stream) {
  if (count == 0) return;
  prologue_kernel<<<static_cast<unsigned>(ceil_divide(count, kPrologueThreads)), kPrologueThreads, 0,
                    stream>>>(groups, count, steps, scalars, check);
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
