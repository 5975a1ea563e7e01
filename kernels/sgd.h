// The SGD kernels as the optimizer calls them: the loops of a rule over tensors of the Adam kernels, whose exp_avg is the
// momentum buffer. No LibTorch.
#pragma once

#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/sgd.h>

namespace pacer::kernels {

// The loops of the rule with this kind of momentum, for every AdamStorage. Without a momentum they read no exp_avg, which may
// be null.
const UpdateLoops& sgd_update(SgdMomentum momentum);

// Their loops for GPUs.
void sgd_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
              const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void sgd_momentum_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                       const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void sgd_nesterov_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                       const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

}  // namespace pacer::kernels
