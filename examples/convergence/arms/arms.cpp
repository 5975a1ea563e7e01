// The registry of arms. To add one: write its line in arms(), with a function that makes its optimizer and
// the methods it uses; a method of its own is a line in add_methods.
#include "arms.h"

#include <algorithm>

#include <pacer/core/error.h>

#include "optimizers.h"

namespace convergence {
namespace {

void refresh_variance(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
  options.refresh_variance_every(recipe.settings.onebit_refresh);
}

void share_one_scale(const OptimizerRecipe& /*recipe*/, pacer::OneBitAdamOptions& options) {
  options.block_scales(false);
}

void between_nodes(const OptimizerRecipe& /*recipe*/, pacer::OneBitAdamOptions& options) {
  options.hierarchical(true);
}

void compress_nothing(const OptimizerRecipe& /*recipe*/, pacer::OneBitAdamOptions& options) {
  options.one_bit(false);
}

// At half of --onebit-freeze, while the curriculum still moves: later positions have no variance yet.
void freeze_early(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
  options.freeze_step(std::max<int64_t>(1, recipe.settings.freeze_step() / 2)).allow_early_freeze(true);
}

void freeze_early_and_refresh(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
  freeze_early(recipe, options);
  refresh_variance(recipe, options);
}

void freeze_early_without_floor(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
  freeze_early(recipe, options);
  options.variance_floor(0);
}

// Compared where no arm is named, unless the preset has a list of its own.
std::vector<Arm> compared_arms() {
  return {{"fused-adamw",
           "pacer::FusedAdamW, all parameters in one pass over memory; so in all arms below but adamw, muon, "
           "lamb and the 1-bit ones",
           fused_adamw()},
          {"curriculum",
           "pacer::SequenceLength: short sequences at first, cut off, so that steps are smaller and more",
           fused_adamw(),
           {Method::curriculum}},
          {"onebit-adam", "pacer::OneBitAdam: after --onebit-freeze of the steps, momentum travels as signs",
           onebit_adam()},
          {"onebit-adam-curriculum",
           "onebit-adam with the curriculum; it freezes by itself, once that has ended",
           onebit_adam(freeze_automatically),
           {Method::curriculum}},
          {"muon",
           "pacer::Muon: hidden matrices move by their momentum made orthogonal, everything else by AdamW",
           muon()},
          {"lamb", "pacer::FusedLamb: each matrix moves in proportion to its own size", lamb()},
          {"onebit-lamb", "pacer::OneBitLamb: lamb, its momentum as signs after --onebit-freeze of the steps",
           onebit_lamb(Freeze::at_step)}};
}

std::vector<Arm> arms_by_name() {
  return {
      {"normuon", "muon with normalize_rows (NorMuon): no row of a matrix moves much faster than others",
       normuon()},
      {"adamw-8bit", "fused-adamw with state_bits(8): moments in 8 bits", adamw_8bit()},
      {"onebit-muon",
       "pacer::OneBitMuon: each process makes its own momentum orthogonal, and signs of the results travel, "
       "from the first step on",
       onebit_muon()},
      {"adamw", "torch::optim::AdamW, LibTorch's own loop over parameters", torch_adamw()},
      {"stable-decay",
       "pacer::warmup_stable_decay: the rate stays at its peak and falls in a line over the last "
       "--decay-share of the budget, where other arms follow a cosine",
       fused_adamw(),
       {Method::stable_decay}},
      {"average",
       "pacer::WeightAverage: validation looks at an exponential average of the weights, --average-decay",
       fused_adamw(),
       {Method::average}},
      {"stable-average",
       "average over a rate that stays at its peak to the end",
       fused_adamw(),
       {Method::stable_decay, Method::average}},
      {"growing-batch",
       "pacer::BatchSchedule: steps of twice as many sequences after a quarter, and four times after half of "
       "the budget",
       fused_adamw(),
       {Method::growing_batch}},
      {"curriculum-reshape",
       "curriculum whose batches keep their tokens: more and shorter sequences at first",
       fused_adamw(),
       {Method::curriculum, Method::reshape}},
      {"layer-drop",
       "pacer::LayerDrop: deeper layers run less and less often",
       fused_adamw(),
       {Method::layer_drop}},
      {"curriculum-layer-drop",
       "curriculum and layer-drop together",
       fused_adamw(),
       {Method::curriculum, Method::layer_drop}},
      {"onebit-adam-curriculum-layer-drop",
       "onebit-adam-curriculum with layer drop",
       onebit_adam(freeze_automatically),
       {Method::curriculum, Method::layer_drop}},
      {"lamb-curriculum-layer-drop",
       "lamb with curriculum and layer drop",
       lamb(),
       {Method::curriculum, Method::layer_drop}},
      {"onebit-lamb-curriculum-layer-drop",
       "onebit-lamb with both; it freezes by itself, once the curriculum has ended",
       onebit_lamb(Freeze::automatically),
       {Method::curriculum, Method::layer_drop}},
      {"recompute",
       "pacer::Recompute: blocks keep their input only and run again in backward; fused-adamw's losses, to "
       "the bit",
       fused_adamw(),
       {Method::recompute}},
      {"shards",
       "pacer::Shards: each rank has its part of state and gradients; fused-adamw's losses. A single process "
       "has nobody to share with",
       fused_adamw(),
       {Method::shards}},
      {"shards-blocks",
       "shards whose ranks keep their part of the blocks' parameters only, too; gathered where they run",
       fused_adamw(),
       {Method::shards_blocks}},
      {"shards-nodes",
       "shards-blocks inside nodes of --ranks-per-node ranks; sums of gradients travel between nodes",
       fused_adamw(),
       {Method::shards_nodes}},
      {"pipeline",
       "pacer::Pipeline over all ranks: each has a part of the blocks, and the batch goes through them in "
       "micro-batches, 1F1B; fused-adamw's losses",
       fused_adamw(),
       {Method::pipeline}},
      {"onebit-adam-refreshed", "onebit-adam, its variance brought up to date every --onebit-refresh steps",
       onebit_adam(refresh_variance)},
      {"onebit-adam-bf16",
       "onebit-adam whose gradients travel as bfloat16 before the freeze",
       onebit_adam(),
       {Method::bfloat16_wire}},
      {"onebit-adam-bf16-refreshed",
       "the same, its variance brought up to date every --onebit-refresh steps",
       onebit_adam(refresh_variance),
       {Method::bfloat16_wire}},
      {"frozen-uncompressed", "a control: the variance freezes as for onebit-adam, but nothing is compressed",
       onebit_adam(compress_nothing)},
      {"onebit-adam-one-scale",
       "for comparison: onebit-adam with one scale for all instead of one for each 2,048 elements",
       onebit_adam(share_one_scale)},
      {"onebit-adam-nodes",
       "for comparison: onebit-adam between nodes of --ranks-per-node ranks, in full precision inside "
       "them",
       onebit_adam(between_nodes)},
      {"onebit-adam-nodes-shards",
       "onebit-adam-nodes whose ranks share weights, momentum, variance and errors inside a node",
       onebit_adam(between_nodes),
       {Method::shards_nodes}},
      {"onebit-lamb-nodes", "for comparison: onebit-lamb between such nodes",
       onebit_lamb(Freeze::at_step, Workers::nodes)},
      {"onebit-adam-clip-ratio",
       "for comparison: onebit-adam that clips by its ranks' joint norm divided by a ratio measured in "
       "warm-up",
       probing_onebit_adam(),
       {Method::clipping_ratio}},
      {"early-freeze",
       "for teaching: onebit-adam under a curriculum that still moves when the variance freezes, at half of "
       "--onebit-freeze",
       onebit_adam(freeze_early),
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-positions",
       "for teaching: the same with learned positions in full precision, whose variance never freezes",
       onebit_adam(freeze_early, Positions::full_precision),
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-refreshed",
       "for teaching: early-freeze with a variance brought up to date every --onebit-refresh steps",
       onebit_adam(freeze_early_and_refresh),
       {Method::curriculum, Method::largest_update}},
      {"early-freeze-unguarded",
       "for teaching: early-freeze without a floor under the variance, which is zero where nothing was seen "
       "yet",
       onebit_adam(freeze_early_without_floor),
       {Method::curriculum, Method::largest_update}},
      {"naive",
       "for teaching: gradients become signs, with error feedback, and go straight into AdamW",
       fused_adamw(),
       {Method::signed_gradients}},
      {"no-feedback",
       "for teaching: onebit-adam that forgets what rounding to signs lost",
       onebit_adam(),
       {Method::forgotten_errors}},
      {"bfloat16",
       "pacer::Precision::bf16(): forward under autocast, whatever --precision says",
       fused_adamw(),
       {Method::bfloat16}},
      {"lora",
       "with --fine-tune: pacer::modules::add_lora, adapters of rank --lora-rank in all linear layers train, "
       "at "
       "four times the rate, and all else is frozen",
       lora(),
       {Method::adapters}},
      {"qlora",
       "with --fine-tune: the same over weights that pacer::modules::quantize has put in 4 bits",
       lora(),
       {Method::adapters, Method::four_bits}},
      {"fused-layers",
       "blocks are pacer::modules::TransformerLayer, whose elementwise passes are fused",
       fused_adamw(),
       {Method::fused_layers}},
      {"fp8",
       "fused-layers with pacer::Precision::fp8(): the matrices of blocks multiply 8-bit floats, scaled by "
       "the magnitudes of the last steps, and all else is bfloat16",
       fused_adamw(),
       {Method::fused_layers, Method::fp8}},
      {"fp8-current",
       "the same, each tensor scaled by its own magnitude",
       fused_adamw(),
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

}  // namespace convergence
