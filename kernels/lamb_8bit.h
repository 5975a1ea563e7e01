// LAMB with its moments in 8 bits (math/moment_codes.h): the passes of lamb.h, which decode and encode moments in the same
// pass over memory. The first pass leaves codes and scales of the new moments, and both passes make the update u of
// what those codes say. So the norm of u is that of the step that is taken, and the second pass, which has no gradient
// to make the moments anew, needs nothing else. 22.375 bytes moved per parameter in fp32.
#pragma once

#include <pacer/kernels/adam_8bit.h>
#include <pacer/kernels/lamb.h>

namespace pacer::kernels {

// For every AdamStorage but f64. In AdamTensor moments and scales are those of kAdam8BitUpdate, and tiles begin at
// multiples of kMomentGroup. All else is as in lamb_moments_cpu, lamb_update_cpu and lamb_cuda; the ratios in between
// are lamb_ratio_cpu's.
void lamb_8bit_moments_cpu(AdamStorage storage, const Tile& unit, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars,
                           double* parameter_partial, double* update_partial);
void lamb_8bit_update_cpu(AdamStorage storage, const Tile& tile, const AdamTensor* tensors,
                          const AdamGradient* gradients, const StepScalars* scalars, const LambRatio* ratios);
void lamb_8bit_cuda(AdamStorage storage, const LambWork& work, const AdamTensor* tensors,
                    const AdamGradient* gradients, const StepScalars* scalars, bool follows_prologue,
                    Stream stream, LambLaunches which = LambLaunches::all);

extern const LambLoops kLamb8BitLoops;

}  // namespace pacer::kernels
