// OneBitAdam: Adam whose ranks exchange the signs of their momentum, one bit an element instead of 32 (Tang
// et al., "1-bit Adam", arXiv:2102.02888). For ranks joined by networks that are slow beside their GPUs or
// CPUs.
//
//   auto world = pacer::Communicator::from_environment();
//   pacer::OneBitAdam optimizer(model->named_parameters(),
//                               pacer::OneBitAdamOptions(1e-3).freeze_step(2'000), world);
//   pacer::Session session(*model, optimizer, world);
//
// Two phases. Warm-up: gradients are averaged over ranks in full precision and the step is AdamW's, to the
// bit that of FusedAdamW. Then the variance freezes, and from there on each rank adds its own gradient to the
// shared momentum and the ranks agree on the new momentum in signs and scales; what rounding to signs loses
// is added to the next step's (compression/compressed_all_reduce.h). Replicas stay identical to the bit in
// both.
//
// Parameters of less than two dimensions (biases, gains) stay in full precision unless
// compress_vectors(true). No element moves further in a step than Adam could move it, and one that never had
// a gradient before the freeze does not follow signs.
//
// Without a Session, step() averages over ranks what has to be averaged, after backward, and compares first
// what ranks are about to do, before the first step also the values of parameters. Gradients that are not
// finite on any rank change nothing on all of them. A parameter that has a gradient on no rank sits the step
// out; once the variance is frozen, it counts in compressed groups as one whose gradient is zero. One with
// requires_grad off stays as it is in any phase. Clipping uses one factor for all ranks: max_norm / N with
// N^2 = mean over ranks of |own gradient|^2 / W for what is compressed, plus |mean gradient|^2 for what is
// not.
//
// Parameters: as for FusedAdamW, but without gaps between elements, and not fp64 where they are compressed;
// on the CPU, or on a GPU, where a step is enqueued and nothing waits: gradients that are not finite change
// nothing there, too. On a GPU, a failure inside an exchange is thrown as an Error by a later step. At the
// freeze, and with freeze_automatically in each step in which it might come, the host waits for the GPU.
#pragma once

#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

class OneBitAdam : public OneBitOptimizerOf<OneBitAdamOptions> {
 public:
  using OneBitOptimizerOf::OneBitOptimizerOf;
};

}  // namespace pacer
