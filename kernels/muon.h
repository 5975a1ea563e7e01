// The Muon kernels as the optimizer calls them: raw pointers, no LibTorch. A step is a direction for each
// matrix; the products that orthogonalise these, which are the caller's; then momentum, and the update with the
// results. So nothing has changed where memory for the products runs out. Tensors, gradients, scalars and dtype
// sets are those of the Adam kernels. exp_avg is the momentum.
#pragma once

#include <pacer/kernels/adam.h>

namespace pacer::kernels {

// How directions lie in memory: fp64 with AdamStorage::f64 and only there.
enum class DirectionType : uint32_t { f64, f32, bf16 };

// What one launch reads and writes.
struct MuonLaunch {
  AdamStorage storage;
  DirectionType type;
  bool nesterov;
};

// Elements of the tile's tensor. Where there are `directions`, writes directions[tile.tensor], as many elements
// as the tensor has, and leaves the momentum as it is; where they are null, changes the momentum. Leaves out
// tensors without a gradient. Single-threaded; full denormals.
void muon_momentum_cpu(MuonLaunch launch, const Tile& tile, const AdamTensor* tensors,
                       const AdamGradient* gradients, void* const* directions, const StepScalars* scalars);
// The same for all tiles, those of adam_cuda, in one launch. Pointers are device memory.
void muon_momentum_cuda(MuonLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                        const AdamGradient* gradients, void* const* directions, const StepScalars* scalars,
                        Stream stream);

// The loops of a format of momentum: those above, or those of muon_8bit.h, which have the same arguments.
struct MuonLoops {
  decltype(&muon_momentum_cpu) momentum_cpu;
  decltype(&muon_momentum_cuda) momentum_cuda;
};
extern const MuonLoops kMuonLoops;

// The rows of matrix number `matrix`: `count` numbers each, of double with AdamStorage::f64 and of float with
// all others. Those of `fresh` are the means of this step's squares, and become the moments of the rows.
struct MuonRows {
  int64_t matrix;
  void* moments;
  void* fresh;
  int64_t count;
};

// What one launch over rows does: it makes the new moments in `fresh`, or stores them.
struct MuonRowsLaunch {
  AdamStorage storage;
  bool stores;
  double beta;
};

// For `count` matrices; leaves out those without a gradient, gradients[matrix]. Single-threaded.
void muon_rows_cpu(MuonRowsLaunch launch, const MuonRows* rows, int64_t count, const AdamGradient* gradients,
                   const StepScalars* scalars);
// The same on the GPU. Pointers are device memory.
void muon_rows_cuda(MuonRowsLaunch launch, const MuonRows* rows, int64_t count, const AdamGradient* gradients,
                    const StepScalars* scalars, Stream stream);

// The update, where gradients are the orthogonalised matrices, in the dtype of the parameters. It reads no
// state but master copies and remainders. The second one decays cautiously.
extern const UpdateLoops kMuonUpdate, kCautiousMuonUpdate;
// Their loops for GPUs.
void muon_update_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                      const AdamGradient* gradients, const StepScalars* scalars, Stream stream);
void cautious_muon_update_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                               const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

}  // namespace pacer::kernels
