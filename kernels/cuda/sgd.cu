// SGD in the CUDA loop of element_loop.cuh.
#include <pacer/kernels/sgd.h>

#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {

void sgd_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
              const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<SgdRule<SgdMomentum::none>>("the SGD update", launch, tiles, tensors, gradients, scalars,
                                            stream);
}

void sgd_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                       const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<SgdRule<SgdMomentum::plain>>("the SGD update", launch, tiles, tensors, gradients, scalars,
                                             stream);
}

void sgd_nesterov_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                       const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<SgdRule<SgdMomentum::nesterov>>("the SGD update", launch, tiles, tensors, gradients, scalars,
                                                stream);
}

}  // namespace pacer::kernels
