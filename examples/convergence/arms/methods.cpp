// What an arm adds to a Session beyond the hooks of all arms.
#include <cmath>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/recompute.h>
#include <pacer/hooks/weight_average.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/parallel/shards.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/sequence_length.h>

#include "arms.h"
#include "clipping_ratio.h"
#include "teaching.h"

namespace convergence {
namespace {

pacer::DropDepth drop_depth(const std::string& name) {
  if (name == "from-zero") return pacer::DropDepth::from_zero;
  if (name == "uniform") return pacer::DropDepth::uniform;
  if (name == "exponential") return pacer::DropDepth::exponential;
  return pacer::DropDepth::linear;
}

pacer::LayerDropOptions layer_drop_options(const Settings& settings, uint64_t seed) {
  const auto options = pacer::LayerDropOptions()
                           .theta_bar(settings.layer_drop_theta)
                           .depth(drop_depth(settings.layer_drop_depth))
                           .seed(seed);
  const std::string& time = settings.layer_drop_time;
  const auto follows = [&](const pacer::LearningRateSchedule& schedule) {
    return pacer::LayerDropOptions(options).schedule(schedule);
  };
  if (time == "constant") return follows(pacer::constant_schedule());
  if (time == "falling") {
    return follows(pacer::warmup_linear(pacer::LearningRateScheduleOptions().total_tokens(settings.tokens)));
  }
  if (time == "up-down") return follows(pacer::warmup_linear({settings.steps() / 2, settings.steps()}));
  return pacer::LayerDropOptions(options).gamma(settings.gamma());
}

}  // namespace

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
    session->use(pacer::LayerDrop(blocks, layer_drop_options(settings, seed)));
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
