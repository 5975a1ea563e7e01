// What an arm adds to a Session beyond the hooks of all arms.
#include <cmath>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/recompute.h>
#include <pacer/hooks/weight_average.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/parallel/shards.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/sequence_length.h>

#include "arms.h"
#include "clipping_ratio.h"
#include "teaching.h"

namespace convergence {

void add_methods(const Arm& arm, const Settings& settings, const pacer::Blocks& blocks, uint64_t seed,
                 pacer::Session* session) {
  if (arm.has(Method::curriculum)) {
    const double ramp = std::round(settings.curriculum_share * static_cast<double>(settings.tokens));
    session->use(pacer::SequenceLength(
        pacer::SequenceLengthOptions(settings.first_length(), settings.sequence)
            .ramp_tokens(static_cast<int64_t>(ramp))
            .mode(arm.has(Method::reshape) ? pacer::LengthMode::reshape : pacer::LengthMode::truncate)));
  }
  if (arm.has(Method::average)) {
    session->use(pacer::WeightAverage(pacer::ema(settings.average_decay).warm_up(true)));
  }
  if (arm.has(Method::growing_batch)) {
    session->use(pacer::GradientAccumulation(
        pacer::BatchSchedule(1).table({{settings.tokens / 4, 2}, {settings.tokens / 2, 4}}).by_tokens()));
  }
  if (arm.has(Method::layer_drop)) {
    session->use(pacer::LayerDrop(
        blocks,
        pacer::LayerDropOptions().theta_bar(settings.layer_drop_theta).gamma(settings.gamma()).seed(seed)));
  }
  if (arm.has(Method::recompute)) session->use(pacer::Recompute(blocks));
  if (arm.has(Method::shards)) session->use(pacer::Shards());
  if (arm.has(Method::shards_blocks)) session->use(pacer::Shards(blocks));
  if (arm.has(Method::shards_nodes)) {
    session->use(pacer::Shards(blocks, pacer::ShardsOptions().over(pacer::ShardGroup::node)));
  }
  if (arm.has(Method::bfloat16_wire)) {
    session->use(pacer::DataParallel(pacer::DataParallelOptions().wire_dtype(at::kBFloat16)));
  }
  if (arm.has(Method::signed_gradients)) session->use(SignedGradients());
  if (arm.has(Method::forgotten_errors)) session->use(ForgottenErrors());
  if (arm.has(Method::clipping_ratio)) session->use(ClippingRatio(settings.clip));
  if (arm.has(Method::fp8)) {
    session->use(pacer::Precision::fp8());
  } else if (arm.has(Method::fp8_current)) {
    session->use(pacer::Precision::fp8(pacer::Fp8Options().recipe(pacer::Fp8Recipe::current)));
  } else if (arm.has(Method::bfloat16) || settings.precision == "bfloat16") {
    session->use(pacer::Precision::bf16());
  }
}

}  // namespace convergence
