#include <pacer/kernels/cuda/element_loop.cuh>

#include "lion_cuda.h"
#include "lion_rule.h"

namespace {

using namespace pacer::kernels;

void run(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors, const AdamGradient* gradients,
         const StepScalars* scalars, Stream stream) {
  elements_cuda<LionRule>("the Lion update", launch, tiles, tensors, gradients, scalars, stream);
}

}  // namespace

decltype(UpdateLoops::cuda) const kLionCuda = run;
