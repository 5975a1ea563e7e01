// RMSprop in the CUDA loop of element_loop.cuh.
#include <pacer/kernels/rmsprop.h>

#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {

void rmsprop_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                  const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<RmspropRule<false, false>>("the RMSprop update", launch, tiles, tensors, gradients, scalars,
                                           stream);
}

void rmsprop_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<RmspropRule<true, false>>("the RMSprop update", launch, tiles, tensors, gradients, scalars,
                                          stream);
}

void centered_rmsprop_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<RmspropRule<false, true>>("the RMSprop update", launch, tiles, tensors, gradients, scalars,
                                          stream);
}

void centered_rmsprop_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                                    const AdamGradient* gradients, const StepScalars* scalars,
                                    Stream stream) {
  elements_cuda<RmspropRule<true, true>>("the RMSprop update", launch, tiles, tensors, gradients, scalars,
                                         stream);
}

}  // namespace pacer::kernels
