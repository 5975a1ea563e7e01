#include "guidance.h"

#include <algorithm>

namespace convergence {
namespace {

struct KnownHint {
  const char* arm;
  const char* text;
  const char* code = "";
  const char* page = "";
};

constexpr KnownHint kHints[] = {
    {"fused-adamw", "what the others are measured by: AdamW in one pass over memory",
     "pacer::FusedAdamW optimizer(model->named_parameters(), 3e-4);", "fused-adam.md"},
    {"adamw", "LibTorch's own loop over parameters: the same loss, more of the optimizer's time"},
    {"onebit-adam",
     "close to AdamW's loss; where it is below, the run was short. Costs memory for errors, and time",
     "pacer::OneBitAdam optimizer(parameters, options.freeze_step(N), world);", "onebit-adam.md"},
    {"curriculum",
     "a lower loss at tens of thousands of tokens a step, for more steps; a higher one at hundreds",
     "session.use(pacer::SequenceLength(options.ramp_steps(N)));", "curriculum.md"},
    {"curriculum-reshape",
     "a lower loss at equal tokens and time where the ramp is short; a long ramp costs loss",
     "session.use(pacer::SequenceLength(options.mode(reshape)));", "curriculum.md"},
    {"onebit-adam-curriculum", "both at once: it froze when the curriculum had ended, and not before",
     "options.freeze_automatically(steps)", "onebit-adam.md"},
    {"lamb", "made for large batches: a higher loss than AdamW's at small ones",
     "pacer::FusedLamb optimizer(model->named_parameters(), 1e-3);", "fused-lamb.md"},
    {"onebit-lamb", "its loss beside lamb's; costs memory for errors",
     "pacer::OneBitLamb optimizer(parameters, options.freeze_step(N), world);", "onebit-lamb.md"},
    {"recompute", "fused-adamw's loss to the bit with less memory, for a second forward pass: time",
     "session.use(pacer::Recompute(blocks));", "recompute.md"},
    {"shards", "fused-adamw's loss, a part of state and gradients on each rank: memory falls, bytes stay",
     "session.use(pacer::Shards());", "sharding.md"},
    {"layer-drop", "less time a step for a higher loss: it pays in long runs of deep models, if anywhere",
     "session.use(pacer::LayerDrop(blocks, options));", "layer-drop.md"},
    {"curriculum-layer-drop", "the least time a step, and the highest loss in short runs"},
    {"lora", "the loss beside that of training all parameters, and how few of them it trains",
     "pacer::nn::add_lora(*model, pacer::nn::LoraOptions(8).targets({\"*\"}));", "lora.md"},
    {"qlora", "the loss beside lora's, before and after: adapters make up for what 4 bits cost",
     "pacer::nn::quantize(*model, options.targets({\"*\"}));", "lora.md"},
    {"pipeline", "the loss is fused-adamw's; ranks that share out layers send activations, not gradients",
     "pacer::Pipeline pipeline(...);", "pipeline.md"},
};

}  // namespace

std::vector<Hint> hints(const std::vector<std::string>& arms, int64_t processes) {
  std::vector<Hint> all;
  if (arms.size() < 2) return all;
  for (const std::string& arm : arms) {
    const auto known = std::find_if(std::begin(kHints), std::end(kHints),
                                    [&](const KnownHint& each) { return arm == each.arm; });
    if (known == std::end(kHints)) continue;
    all.push_back({arm, known->text, known->code, known->page});
    if (arm.rfind("onebit", 0) != 0) continue;
    all.back().text +=
        processes > 1 ? "; its bytes: 'sent per rank'" : "; --processes 2 shows the bytes saved";
  }
  return all;
}

std::string what_to_look_at(const std::vector<std::string>& arms, int64_t processes) {
  const std::vector<Hint> all = hints(arms, processes);
  std::string text;
  for (const Hint& hint : all) {
    text += hint.arm + ": " + hint.text + "\n";
    if (!hint.code.empty()) text += "    " + hint.code + "   docs/" + hint.page + "\n";
  }
  return text.empty() ? text : "What to look at, and what to type next:\n\n" + text;
}

}  // namespace convergence
