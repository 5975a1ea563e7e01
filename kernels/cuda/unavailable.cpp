// Stands in for the CUDA loops in a build without CUDA: the same functions, each an error that names the way
// out.
#include <pacer/core/error.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/lamb.h>
#include <pacer/kernels/norm.h>

namespace pacer::kernels {
namespace {

[[noreturn]] void refuse() {
  throw Unavailable(
      "this pacer was built without CUDA: configure it with -DPACER_CUDA=ON (a CUDA toolkit is needed) or "
      "move the "
      "parameters to the CPU");
}

}  // namespace

int64_t adam_cuda_block_tile(AdamStorage) { refuse(); }
int64_t adam_cuda_warp_tile(AdamStorage) { refuse(); }
void adam_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, const void*, Stream) {
  refuse();
}
void adam_prologue_cuda(const AdamSlot*, int64_t, int64_t*, void*, const GradientCheck*, Stream) { refuse(); }
void lamb_cuda(AdamStorage, const LambWork&, const AdamTensor*, const AdamGradient*, const void*, bool,
               Stream) {
  refuse();
}
void sum_of_squares_cuda(GradientType, const Tile*, int64_t, const AdamGradient*, double*, Stream) {
  refuse();
}
void finish_check_cuda(const double*, int64_t, const GuardRule&, GradientCheck*, Stream) { refuse(); }

}  // namespace pacer::kernels
