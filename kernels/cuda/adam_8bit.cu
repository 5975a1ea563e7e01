// Adam with moments in 8 bits in the CUDA loop of coded_loop.cuh.
#include <pacer/kernels/adam_8bit.h>

#include <pacer/kernels/math/moment_codes.h>
#include <pacer/kernels/cuda/coded_loop.cuh>

namespace pacer::kernels {

void adam_8bit_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                    const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  coded_cuda<AdamRule<false>, EightBitMoments>("the Adam update with moments in 8 bits", launch, tiles,
                                               tensors, gradients, scalars, stream);
}

}  // namespace pacer::kernels
