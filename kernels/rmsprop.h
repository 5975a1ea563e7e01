// The RMSprop kernels as the optimizer calls them: the loops of a rule over tensors of the Adam kernels, whose moments mean what
// math/rmsprop.h says. No LibTorch.
#pragma once

#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/rmsprop.h>

namespace pacer::kernels {

// The loops of the rule, for every AdamStorage. Moments that a form does not have are not read and may be null.
const UpdateLoops& rmsprop_update(bool has_momentum, bool is_centered);

// Their loops for GPUs.
void rmsprop_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                  const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void rmsprop_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void centered_rmsprop_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void centered_rmsprop_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                                    const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

}  // namespace pacer::kernels
