// Stands in for the CUDA loops in a build without CUDA: the same functions, each an error that names the way
// out.
#include <pacer/core/error.h>
#include <pacer/kernels/activation.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/adam_8bit.h>
#include <pacer/kernels/cross_entropy.h>
#include <pacer/kernels/fp8.h>
#include <pacer/kernels/lamb.h>
#include <pacer/kernels/lamb_8bit.h>
#include <pacer/kernels/layer_norm.h>
#include <pacer/kernels/muon.h>
#include <pacer/kernels/muon_8bit.h>
#include <pacer/kernels/nf4.h>
#include <pacer/kernels/norm.h>
#include <pacer/kernels/onebit.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/kernels/onebit_lamb.h>
#include <pacer/kernels/rmsprop.h>
#include <pacer/kernels/rotary.h>
#include <pacer/kernels/schedule_free.h>
#include <pacer/kernels/sgd.h>

namespace pacer::kernels {
namespace {

[[noreturn]] void refuse() {
  throw Unavailable(
      "this pacer was built without CUDA: configure it with -DPACER_CUDA=ON (a CUDA toolkit is needed) or "
      "move the "
      "parameters to the CPU");
}

}  // namespace

bool is_capturing(Stream) { refuse(); }
int compute_capability(int) { refuse(); }
std::array<int64_t, 2> gpu_id(int) { refuse(); }
int64_t adam_cuda_block_tile(AdamStorage) { refuse(); }
int64_t adam_cuda_warp_tile(AdamStorage) { refuse(); }
void adam_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, const StepScalars*,
               Stream) {
  refuse();
}
void adam_8bit_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, const StepScalars*,
                    Stream) {
  refuse();
}
void cross_entropy_cuda(const CrossEntropy&, Stream) { refuse(); }
void adam_prologue_cuda(const StepGroup*, int64_t, StepCount*, StepScalars*, const GradientCheck*, Stream) {
  refuse();
}
void replace_factor_cuda(const StepScalars*, int64_t, const double*, StepScalars*, Stream) { refuse(); }
void lamb_cuda(AdamStorage, const LambWork&, const AdamTensor*, const AdamGradient*, const StepScalars*, bool,
               Stream, LambLaunches) {
  refuse();
}
void lamb_8bit_cuda(AdamStorage, const LambWork&, const AdamTensor*, const AdamGradient*, const StepScalars*,
                    bool, Stream, LambLaunches) {
  refuse();
}
void muon_momentum_cuda(MuonLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, void* const*,
                        const StepScalars*, Stream) {
  refuse();
}
void muon_8bit_momentum_cuda(MuonLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                             void* const*, const StepScalars*, Stream) {
  refuse();
}
void muon_rows_cuda(MuonRowsLaunch, const MuonRows*, int64_t, const AdamGradient*, const StepScalars*,
                    Stream) {
  refuse();
}
void cautious_muon_update_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                               const StepScalars*, Stream) {
  refuse();
}
void muon_update_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                      const StepScalars*, Stream) {
  refuse();
}
void rmsprop_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, const StepScalars*,
                  Stream) {
  refuse();
}
void rmsprop_momentum_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                           const StepScalars*, Stream) {
  refuse();
}
void centered_rmsprop_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                           const StepScalars*, Stream) {
  refuse();
}
void centered_rmsprop_momentum_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                                    const StepScalars*, Stream) {
  refuse();
}
void sgd_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*, const StepScalars*,
              Stream) {
  refuse();
}
void sgd_momentum_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                       const StepScalars*, Stream) {
  refuse();
}
void sgd_nesterov_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                       const StepScalars*, Stream) {
  refuse();
}
void activation_cuda(const ActivationForward&, Stream) { refuse(); }
void activation_backward_cuda(const ActivationBackward&, Stream) { refuse(); }
void fp8_cast_cuda(const Fp8Cast&, Stream) { refuse(); }
void fp8_transpose_cuda(const uint8_t*, int64_t, int64_t, uint8_t*, Stream) { refuse(); }
void fp8_update_cuda(Fp8Scale*, uint32_t*, int64_t, const Fp8Rule&, const GradientCheck*, Stream) {
  refuse();
}
void layer_norm_cuda(const LayerNormForward&, Stream) { refuse(); }
void layer_norm_backward_cuda(const LayerNormBackward&, Stream) { refuse(); }
void rotary_cuda(const RotaryForward&, Stream) { refuse(); }
void rotary_backward_cuda(const RotaryBackward&, Stream) { refuse(); }
void nf4_quantize_cuda(const void*, ElementType, const Nf4Codes&, float*, Stream) { refuse(); }
void nf4_decode_cuda(const Nf4Codes&, ElementType, void*, int64_t, int64_t, Stream) { refuse(); }
void schedule_free_cuda(AdamLaunch, const AdamTiles&, const AdamTensor*, const AdamGradient*,
                        const StepScalars*, Stream) {
  refuse();
}
void sum_of_squares_cuda(GradientType, const Tile*, int64_t, const AdamGradient*, const uint32_t*, double*,
                         Stream, int64_t) {
  refuse();
}
void sum_of_magnitudes_cuda(const Tile*, int64_t, const AdamGradient*, double*, Stream) { refuse(); }
void sum_partials_cuda(const double*, int64_t, double*, Stream) { refuse(); }
void finish_check_cuda(const double*, int64_t, const GuardRule*, GradientCheck*, Stream) { refuse(); }
void early_factor_cuda(const double*, double, double, const GuardRule*, const GradientCheck*, double*,
                       Stream) {
  refuse();
}
void onebit_compress_values_cuda(const OneBitCudaSide&, const float*, const OneBitControl&, Stream) {
  refuse();
}
void onebit_compress_mean_cuda(const OneBitCudaSide&, const OneBitMessages&, const OneBitControl&, Stream) {
  refuse();
}
void onebit_finish_side_cuda(const OneBitCudaSide&, const OneBitCall&, const OneBitControl&, Stream) {
  refuse();
}
void onebit_check_messages_cuda(const OneBitMessages&, const OneBitCall&, bool, const OneBitControl&,
                                Stream) {
  refuse();
}
void onebit_forget_mean_cuda(const OneBitControl&, Stream) { refuse(); }
void onebit_decode_cuda(const OneBitMessages&, int64_t, float*, const OneBitControl&, Stream) { refuse(); }
void onebit_compress_momentum_cuda(const OneBitCudaSide&, const OneBitAdamWork&, OneBitStorage,
                                   const OneBitControl&, Stream) {
  refuse();
}
void onebit_dense_momentum_cuda(AdamStorage, const AdamTiles&, const OneBitAdamWork&, float*, bool,
                                const OneBitControl&, Stream) {
  refuse();
}
void onebit_update_cuda(AdamStorage, const AdamTiles&, const OneBitAdamWork&, bool, const OneBitControl&,
                        Stream) {
  refuse();
}
void onebit_lamb_moments_cuda(AdamStorage, const Tile*, const uint32_t*, int64_t, const OneBitLambWork&, bool,
                              const OneBitControl&, Stream) {
  refuse();
}
void onebit_lamb_factors_cuda(int64_t, const OneBitLambWork&, const OneBitControl&, Stream) { refuse(); }
void onebit_lamb_update_cuda(AdamStorage, const AdamTiles&, const OneBitLambWork&, bool, const OneBitControl&,
                             Stream) {
  refuse();
}
void onebit_floors_cuda(const OneBitFloors&, const OneBitControl&, Stream) { refuse(); }
void joint_sum_of_squares_cuda(const double*, int64_t, double, const double*, double*, Stream) { refuse(); }

}  // namespace pacer::kernels
