// Schedule-Free AdamW in the CUDA loop of element_loop.cuh.
#include <pacer/kernels/schedule_free.h>

#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {

void schedule_free_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                        const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  elements_cuda<ScheduleFreeRule, /*kHasRows=*/false>("the Schedule-Free AdamW update", launch, tiles,
                                                      tensors, gradients, scalars, stream);
}

}  // namespace pacer::kernels
