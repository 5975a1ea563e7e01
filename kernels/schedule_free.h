// Schedule-Free AdamW (math/schedule_free.h) over whole tensors. exp_avg holds z. A step moves as many bytes as
// AdamW's, and its scalars come from a StepGroup whose settings say UpdateRule::schedule_free.
#pragma once

#include <pacer/kernels/adam.h>

namespace pacer::kernels {

// The loops of the rule, for every AdamStorage, without amsgrad.
extern const UpdateLoops kScheduleFreeUpdate;
// Its loop for GPUs.
void schedule_free_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                        const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

}  // namespace pacer::kernels
