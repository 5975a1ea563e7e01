// Muon's momentum in 8 bits: the loops of muon_momentum_cpu and muon_momentum_cuda for codes of the first moment
// (math/moment_codes.h). Directions are made of the new momentum before it is rounded, as Adam's step is; then the
// momentum itself is made anew, and its codes and scales are stored. What comes behind reads no momentum.
#pragma once

#include <pacer/kernels/adam_8bit.h>
#include <pacer/kernels/muon.h>

namespace pacer::kernels {

// For every AdamStorage but f64. In AdamTensor exp_avg has int8 codes and exp_avg_scale their scales, and tiles begin at
// multiples of kMomentGroup. All else is as in muon_momentum_cpu and muon_momentum_cuda.
void muon_8bit_momentum_cpu(MuonLaunch launch, const Tile& tile, const AdamTensor* tensors,
                            const AdamGradient* gradients, void* const* directions,
                            const StepScalars* scalars);
void muon_8bit_momentum_cuda(MuonLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                             const AdamGradient* gradients, void* const* directions,
                             const StepScalars* scalars, Stream stream);

extern const MuonLoops kMuon8BitLoops;

}  // namespace pacer::kernels
