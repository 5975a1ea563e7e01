#include "guidance.h"

#include <algorithm>

namespace convergence {
namespace {

struct Hint {
  const char* arm;
  const char* text;
};

constexpr Hint kHints[] = {
    {"adamw", "LibTorch's own loop over parameters, as a measure for the others"},
    {"fused-adamw", "the loss is AdamW's up to rounding, the optimizer's time per step is not"},
    {"curriculum-layer-drop",
     "cheaper steps, and what they cost; the method is for long runs of deep models"},
    {"onebit-adam", "the loss stays close to AdamW's, though momentum travels as signs"},
    {"onebit-adam-curriculum-layer-drop", "when it froze: not before the curriculum had ended"},
    {"lamb", "made for large batches; at small ones expect no gain over AdamW"},
    {"onebit-lamb", "the loss beside lamb's, which it should stay close to"},
    {"curriculum",
     "cut batches mean more and smaller steps: good at tens of thousands of tokens a step, bad at "
     "hundreds"},
    {"curriculum-reshape",
     "the same tokens a step in shorter sequences at first: loss and time at equal tokens"},
    {"lora", "the loss beside that of training all parameters, and how few of them it trains"},
    {"qlora", "the loss beside lora's, before and after: adapters make up for what 4 bits cost"},
    {"pipeline", "the loss is fused-adamw's; ranks that share out layers send activations, not gradients"},
    {"layer-drop", "time per step falls, loss rises: it pays in long runs of deep models alone"},
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
