// The registry of arms. To add one: write its line in arms(), with a function that makes its optimizer and
// the methods it uses; a method of its own is a line in add_methods.
#include "arms.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <torch/optim/adamw.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/precision.h>
#include <pacer/schedulers/recompute.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/schedulers/shards.h>

#include "clipping_ratio.h"
#include "teaching.h"

namespace convergence {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;
// Of 1, 2, 4 and 8 the best for the tiny preset at 300k tokens. LAMB moves a matrix by this share of its own
// size.
constexpr double kLambRate = 4.0;  // in units of the learning rate of the others

constexpr double kLoraRate = 4.0;  // in the same units

// For every optimizer with the options of AdamW: one group with decay, one without.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_adamw(const OptimizerRecipe& recipe) {
  const auto options = Options(recipe.learning_rate).betas({kBeta1, kBeta2}).eps(kEpsilon);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(recipe.decayed,
                      std::make_unique<Options>(Options(options).weight_decay(recipe.weight_decay)));
  groups.emplace_back(recipe.undecayed, std::make_unique<Options>(Options(options).weight_decay(0.0)));
  return std::make_unique<Optimizer>(groups, options);
}

// The same recipe; biases and gains also have no trust ratio.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> lamb_groups(const OptimizerRecipe& recipe,
                                                           const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(recipe.decayed,
                      std::make_unique<Options>(Options(options).weight_decay(recipe.weight_decay)));
  groups.emplace_back(recipe.undecayed,
                      std::make_unique<Options>(Options(options).weight_decay(0.0).adapt(false)));
  return groups;
}

std::unique_ptr<torch::optim::Optimizer> make_lamb(const OptimizerRecipe& recipe) {
  auto options = pacer::FusedLambOptions(kLambRate * recipe.learning_rate).betas({kBeta1, kBeta2});
  options.max_coeff(recipe.lamb_max_coeff);
  return std::make_unique<pacer::FusedLamb>(lamb_groups(recipe, options), options);
}

// Adapters do not decay: that would pull towards the base.
std::unique_ptr<torch::optim::Optimizer> make_lora(const OptimizerRecipe& recipe) {
  const auto options = pacer::FusedAdamWOptions(kLoraRate * recipe.learning_rate)
                           .betas({kBeta1, kBeta2})
                           .eps(kEpsilon)
                           .weight_decay(0.0);
  return std::make_unique<pacer::FusedAdamW>(recipe.decayed, options);
}

enum class Freeze { at_step, automatically };
enum class Workers { ranks, nodes };

// By itself, at the latest after a third of the run, and not before a curriculum has ended.
template <class Options>
void freeze_automatically(const OptimizerRecipe& recipe, Options& options) {
  constexpr int64_t kFewestSteps = 4;
  options.freeze_step(std::nullopt).freeze_automatically(std::max(kFewestSteps, recipe.planned_steps));
}

// Its bias correction is off by default; here its warm-up is that of the arm above.
template <Freeze kFreeze, Workers kWorkers = Workers::ranks>
std::unique_ptr<torch::optim::Optimizer> make_onebit_lamb(const OptimizerRecipe& recipe) {
  auto options = pacer::OneBitLambOptions(kLambRate * recipe.learning_rate).betas({kBeta1, kBeta2});
  options.bias_correction(true).max_coeff(recipe.lamb_max_coeff).variance_floor(recipe.variance_floor);
  options.freeze_step(recipe.freeze_step).compress_alone(true).factor_max(recipe.lamb_max_factor);
  options.hierarchical(kWorkers == Workers::nodes);
  if (kFreeze == Freeze::automatically) freeze_automatically(recipe, options);
  return std::make_unique<pacer::OneBitLamb>(lamb_groups(recipe, options), options, recipe.world);
}

// Learned positions travel as signs with all others, or stay in full precision.
enum class Positions { compressed, full_precision };

// 1-bit Adam, `change` telling its arms apart. A single process compresses as well, or the arm would show
// nothing.
template <class Optimizer = pacer::OneBitAdam, class Change>
auto onebit_maker(const Change& change, Positions positions = Positions::compressed) {
  return [change, positions](const OptimizerRecipe& recipe) -> std::unique_ptr<torch::optim::Optimizer> {
    using Options = pacer::OneBitAdamOptions;
    auto options = Options(recipe.learning_rate).betas({kBeta1, kBeta2}).eps(kEpsilon);
    options.freeze_step(recipe.freeze_step).variance_floor(recipe.variance_floor);
    options.compress_alone(true).weight_decay(recipe.weight_decay);
    change(recipe, options);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(recipe.decayed, std::make_unique<Options>(options));
    if (positions == Positions::full_precision) {
      auto& others = groups.front().params();
      const auto is_position = [&](const torch::Tensor& tensor) { return tensor.is_same(recipe.positions); };
      others.erase(std::remove_if(others.begin(), others.end(), is_position), others.end());
      groups.emplace_back(std::vector<torch::Tensor>{recipe.positions},
                          std::make_unique<Options>(Options(options).compress(false)));
    }
    groups.emplace_back(recipe.undecayed, std::make_unique<Options>(Options(options).weight_decay(0.0)));
    return std::make_unique<Optimizer>(groups, options, recipe.world);
  };
}

constexpr auto kNoChange = [](const OptimizerRecipe&, pacer::OneBitAdamOptions&) {};
const auto kOneBitAdam = onebit_maker(kNoChange);
const auto kOneBitAdamAutomatic =
    onebit_maker([](const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
      freeze_automatically(recipe, options);
    });
const auto kOneBitAdamRefreshed =
    onebit_maker([](const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
      options.refresh_variance_every(recipe.refresh_every);
    });
const auto kOneBitAdamOneScale = onebit_maker(
    [](const OptimizerRecipe&, pacer::OneBitAdamOptions& options) { options.block_scales(false); });
const auto kOneBitAdamByNodes = onebit_maker(
    [](const OptimizerRecipe&, pacer::OneBitAdamOptions& options) { options.hierarchical(true); });
const auto kOneBitAdamProbing = onebit_maker<ProbingOneBitAdam>(kNoChange);
// At half of --onebit-freeze, while the curriculum still moves: later positions have no variance yet.
template <class Change>
auto early_maker(const Change& change, Positions positions = Positions::compressed) {
  return onebit_maker(
      [change](const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
        options.freeze_step(std::max<int64_t>(1, recipe.freeze_step / 2)).allow_early_freeze(true);
        change(recipe, options);
      },
      positions);
}
const auto kEarlyFreeze = early_maker(kNoChange);
const auto kEarlyFreezePositions = early_maker(kNoChange, Positions::full_precision);
const auto kEarlyFreezeRefreshed =
    early_maker([](const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
      options.refresh_variance_every(recipe.refresh_every);
    });
const auto kEarlyFreezeUnguarded =
    early_maker([](const OptimizerRecipe&, pacer::OneBitAdamOptions& options) { options.variance_floor(0); });
const auto kFrozenUncompressed =
    onebit_maker([](const OptimizerRecipe&, pacer::OneBitAdamOptions& options) { options.one_bit(false); });

constexpr auto kTorchAdamW = make_adamw<torch::optim::AdamW, torch::optim::AdamWOptions>;
constexpr auto kFusedAdamW = make_adamw<pacer::FusedAdamW, pacer::FusedAdamWOptions>;

// Compared where no arm is named, unless the preset has a list of its own.
std::vector<Arm> compared_arms() {
  return {{"fused-adamw",
           "pacer::FusedAdamW, all parameters in one pass over memory; so in all arms below but adamw, lamb "
           "and the 1-bit ones",
           kFusedAdamW},
          {"curriculum",
           "pacer::SequenceLength: short sequences at first, cut off, so that steps are smaller and more",
           kFusedAdamW,
           {Method::curriculum}},
          {"onebit-adam", "pacer::OneBitAdam: after --onebit-freeze of the steps, momentum travels as signs",
           kOneBitAdam},
          {"onebit-adam-curriculum",
           "onebit-adam with the curriculum; it freezes by itself, once that has ended",
           kOneBitAdamAutomatic,
           {Method::curriculum}},
          {"lamb", "pacer::FusedLamb: each matrix moves in proportion to its own size", make_lamb},
          {"onebit-lamb", "pacer::OneBitLamb: lamb, its momentum as signs after --onebit-freeze of the steps",
           make_onebit_lamb<Freeze::at_step>}};
}

std::vector<Arm> arms_by_name() {
  return {
      {"adamw", "torch::optim::AdamW, LibTorch's own loop over parameters", kTorchAdamW},
      {"curriculum-reshape",
       "curriculum whose batches keep their tokens: more and shorter sequences at first",
       kFusedAdamW,
       {Method::curriculum, Method::reshape}},
      {"layer-drop",
       "pacer::LayerDrop: deeper layers run less and less often",
       kFusedAdamW,
       {Method::layer_drop}},
      {"curriculum-layer-drop",
       "curriculum and layer-drop together",
       kFusedAdamW,
       {Method::curriculum, Method::layer_drop}},
      {"onebit-adam-curriculum-layer-drop",
       "onebit-adam-curriculum with layer drop",
       kOneBitAdamAutomatic,
       {Method::curriculum, Method::layer_drop}},
      {"lamb-curriculum-layer-drop",
       "lamb with curriculum and layer drop",
       make_lamb,
       {Method::curriculum, Method::layer_drop}},
      {"onebit-lamb-curriculum-layer-drop",
       "onebit-lamb with both; it freezes by itself, once the curriculum has ended",
       make_onebit_lamb<Freeze::automatically>,
       {Method::curriculum, Method::layer_drop}},
      {"recompute",
       "pacer::Recompute: blocks keep their input only and run again in backward; fused-adamw's losses, to "
       "the bit",
       kFusedAdamW,
       {Method::recompute}},
      {"shards",
       "pacer::Shards: each rank has its part of state and gradients; fused-adamw's losses. A single process "
       "has nobody to share with",
       kFusedAdamW,
       {Method::shards}},
      {"shards-blocks",
       "shards whose ranks keep their part of the blocks' parameters only, too; gathered where they run",
       kFusedAdamW,
       {Method::shards_blocks}},
      {"shards-nodes",
       "shards-blocks inside nodes of --ranks-per-node ranks; sums of gradients travel between nodes",
       kFusedAdamW,
       {Method::shards_nodes}},
      {"pipeline",
       "pacer::Pipeline over all ranks: each has a part of the blocks, and the batch goes through them in "
       "micro-batches, 1F1B; fused-adamw's losses",
       kFusedAdamW,
       {Method::pipeline}},
      {"onebit-adam-refreshed", "onebit-adam, its variance brought up to date every --onebit-refresh steps",
       kOneBitAdamRefreshed},
      {"frozen-uncompressed", "a control: the variance freezes as for onebit-adam, but nothing is compressed",
       kFrozenUncompressed},
      {"onebit-adam-one-scale",
       "for comparison: onebit-adam with one scale for all instead of one for each 2,048 elements",
       kOneBitAdamOneScale},
      {"onebit-adam-nodes",
       "for comparison: onebit-adam between nodes of --ranks-per-node ranks, in full precision inside "
       "them",
       kOneBitAdamByNodes},
      {"onebit-adam-nodes-shards",
       "onebit-adam-nodes whose ranks share weights, momentum, variance and errors inside a node",
       kOneBitAdamByNodes,
       {Method::shards_nodes}},
      {"onebit-lamb-nodes", "for comparison: onebit-lamb between such nodes",
       make_onebit_lamb<Freeze::at_step, Workers::nodes>},
      {"onebit-adam-clip-ratio",
       "for comparison: onebit-adam that clips by its ranks' joint norm divided by a ratio measured in "
       "warm-up",
       kOneBitAdamProbing,
       {Method::clipping_ratio}},
      {"early-freeze",
       "for teaching: onebit-adam under a curriculum that still moves when the variance freezes, at half of "
       "--onebit-freeze",
       kEarlyFreeze,
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-positions",
       "for teaching: the same with learned positions in full precision, whose variance never freezes",
       kEarlyFreezePositions,
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-refreshed",
       "for teaching: early-freeze with a variance brought up to date every --onebit-refresh steps",
       kEarlyFreezeRefreshed,
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-unguarded",
       "for teaching: early-freeze without a floor under the variance, which is zero where nothing was seen "
       "yet",
       kEarlyFreezeUnguarded,
       {Method::curriculum, Method::largest_update}},
      {"naive",
       "for teaching: gradients become signs, with error feedback, and go straight into AdamW",
       kFusedAdamW,
       {Method::signed_gradients}},
      {"no-feedback",
       "for teaching: onebit-adam that forgets what rounding to signs lost",
       kOneBitAdam,
       {Method::forgotten_errors}},
      {"bfloat16",
       "pacer::Precision::bf16(): forward under autocast, whatever --precision says",
       kFusedAdamW,
       {Method::bfloat16}},
      {"lora",
       "with --fine-tune: pacer::nn::add_lora, adapters of rank --lora-rank in all linear layers train, at "
       "four times the rate, and all else is frozen",
       make_lora,
       {Method::adapters}},
      {"qlora",
       "with --fine-tune: the same over weights that pacer::nn::quantize has put in 4 bits",
       make_lora,
       {Method::adapters, Method::four_bits}},
      {"fused-layers",
       "blocks are pacer::nn::TransformerLayer, whose elementwise passes are fused",
       kFusedAdamW,
       {Method::fused_layers}},
      {"fp8",
       "fused-layers with pacer::Precision::fp8(): the matrices of blocks multiply 8-bit floats, scaled by "
       "the magnitudes of the last steps, and all else is bfloat16",
       kFusedAdamW,
       {Method::fused_layers, Method::fp8}},
      {"fp8-current",
       "the same, each tensor scaled by its own magnitude",
       kFusedAdamW,
       {Method::fused_layers, Method::fp8_current}}};
}

}  // namespace

const std::vector<Arm>& arms() {
  static const std::vector<Arm> registered = [] {
    std::vector<Arm> all = compared_arms(), others = arms_by_name();
    for (Arm& arm : others) {
      arm.only_by_name = true;
      all.push_back(std::move(arm));
    }
    return all;
  }();
  return registered;
}

const Arm& find_arm(const std::string& name) {
  for (const Arm& arm : arms()) {
    if (arm.name == name) return arm;
  }
  throw pacer::InvalidArgument("there is no arm '" + name + "'");
}

bool Arm::has(Method method) const {
  return std::find(methods.begin(), methods.end(), method) != methods.end();
}

void add_methods(const Arm& arm, const Settings& settings, const pacer::Blocks& blocks, uint64_t seed,
                 pacer::Session* session) {
  if (arm.has(Method::curriculum)) {
    const double ramp = std::round(settings.curriculum_share * static_cast<double>(settings.tokens));
    session->use(pacer::SequenceLength(
        pacer::SequenceLengthOptions(settings.first_length(), settings.sequence)
            .ramp_tokens(static_cast<int64_t>(ramp))
            .mode(arm.has(Method::reshape) ? pacer::LengthMode::reshape : pacer::LengthMode::truncate)));
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
