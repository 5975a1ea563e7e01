#include "guidance.h"

#include <algorithm>

namespace convergence {
namespace {

struct Hint {
  const char* arm;
  const char* text;
};

constexpr Hint kHints[] = {
    {"fused-adamw", "what the others are measured by: AdamW in one pass over memory"},
    {"adamw", "LibTorch's own loop over parameters: the same loss, more of the optimizer's time"},
    {"onebit-adam",
     "close to AdamW's loss, in short runs below it; costs memory for errors, and the optimizer's time"},
    {"curriculum",
     "a lower loss at tens of thousands of tokens a step, for more steps and time; a higher one at hundreds"},
    {"curriculum-reshape",
     "a lower loss at equal tokens and time where the ramp is short; a long ramp costs loss"},
    {"onebit-adam-curriculum", "both at once: it froze when the curriculum had ended, and not before"},
    {"lamb", "made for large batches: a higher loss than AdamW's at small ones"},
    {"onebit-lamb", "its loss beside lamb's; costs memory for errors"},
    {"recompute", "fused-adamw's loss to the bit with less memory, for a second forward pass: time"},
    {"shards",
     "fused-adamw's loss with a part of state and gradients on each rank: memory falls, bytes stay"},
    {"layer-drop",
     "less time a step for a higher loss: it pays in long runs of deep models alone, if anywhere"},
    {"curriculum-layer-drop", "the least time a step, and the highest loss in short runs"},
    {"lora", "the loss beside that of training all parameters, and how few of them it trains"},
    {"qlora", "the loss beside lora's, before and after: adapters make up for what 4 bits cost"},
    {"pipeline", "the loss is fused-adamw's; ranks that share out layers send activations, not gradients"},
};

}  // namespace

std::string what_to_look_at(const std::vector<std::string>& arms, int64_t processes) {
  if (arms.size() < 2) return {};
  size_t width = 0;
  for (const Hint& hint : kHints) {
    if (std::count(arms.begin(), arms.end(), hint.arm) > 0)
      width = std::max(width, std::string(hint.arm).size());
  }
  std::string text;
  for (const std::string& arm : arms) {
    const auto hint =
        std::find_if(std::begin(kHints), std::end(kHints), [&](const Hint& each) { return arm == each.arm; });
    if (hint == std::end(kHints)) continue;
    text += "  " + arm + std::string(width - arm.size() + 2, ' ') + hint->text;
    const bool sends_signs = arm.rfind("onebit", 0) == 0;
    if (sends_signs && processes > 1) text += "; the bytes stand under 'sent per rank'";
    if (sends_signs && processes == 1) text += "; --processes 2 shows the bytes saved";
    text += '\n';
  }
  return text.empty() ? text : "What to look at:\n" + text;
}

}  // namespace convergence
