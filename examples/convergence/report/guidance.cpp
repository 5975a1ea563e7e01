#include "guidance.h"

#include <algorithm>
#include <sstream>

namespace convergence {
namespace {

struct KnownHint {
  const char* arm;
  const char* text;
  const char* code = "";
  const char* page = "";
};

// Code compiles in a program that has `model`, with `blocks` where it names them, and `session`.
constexpr KnownHint kHints[] = {
    {"fused-adamw", "what the others are measured by: AdamW in one pass over memory",
     "pacer::FusedAdamW optimizer(model->named_parameters(), 3e-4);", "fused-adam.md"},
    {"adamw", "LibTorch's own loop over parameters: the same loss, more of the optimizer's time"},
    {"onebit-adam",
     "close to AdamW's loss; where it is below, the run was short. Costs memory for errors, and time",
     "auto world = pacer::Communicator::from_environment();\n"
     "pacer::OneBitAdam optimizer(model->named_parameters(),\n"
     "                            pacer::OneBitAdamOptions(3e-4).freeze_step(2'000), world);",
     "onebit-adam.md"},
    {"curriculum",
     "a lower loss at tens of thousands of tokens a step, for more steps; a higher one at hundreds",
     "session.use(pacer::SequenceLength(pacer::SequenceLengthOptions(64, 1024).ramp_steps(10'000)));",
     "curriculum.md"},
    {"curriculum-reshape",
     "a lower loss at equal tokens and time where the ramp is short; a long ramp costs loss",
     "session.use(pacer::SequenceLength(pacer::SequenceLengthOptions(64, 1024)\n"
     "                                      .ramp_steps(10'000)\n"
     "                                      .mode(pacer::LengthMode::reshape)));",
     "curriculum.md"},
    {"onebit-adam-curriculum", "both at once: it froze when the curriculum had ended, and not before",
     "const auto options = pacer::OneBitAdamOptions(3e-4).freeze_automatically(10'000);", "onebit-adam.md"},
    {"muon", "a lower loss than AdamW's at the same tokens, for fifteen matrix products a matrix and step",
     "pacer::Muon optimizer(pacer::muon_groups(*model, pacer::MuonOptions(3e-4)));", "muon.md"},
    {"lamb", "made for large batches: a higher loss than AdamW's at small ones",
     "pacer::FusedLamb optimizer(model->named_parameters(), 1e-3);", "fused-lamb.md"},
    {"onebit-lamb", "its loss beside lamb's; costs memory for errors",
     "auto world = pacer::Communicator::from_environment();\n"
     "pacer::OneBitLamb optimizer(model->named_parameters(),\n"
     "                            pacer::OneBitLambOptions(1e-3).freeze_step(2'000), world);",
     "onebit-lamb.md"},
    {"recompute", "fused-adamw's loss to the bit with less memory, for a second forward pass: time",
     "session.use(pacer::Recompute(model->blocks));", "recompute.md"},
    {"shards", "fused-adamw's loss, a part of state and gradients on each rank: memory falls, bytes stay",
     "session.use(pacer::Shards());", "sharding.md"},
    {"layer-drop", "less time a step for a higher loss: it pays in long runs of deep models, if anywhere",
     "session.use(pacer::LayerDrop(model->blocks));", "layer-drop.md"},
    {"curriculum-layer-drop", "the least time a step, and the highest loss in short runs"},
    {"lora", "the loss beside that of training all parameters, and how few of them it trains",
     "pacer::modules::add_lora(*model, pacer::modules::LoraOptions(8).targets({\"*\"}));", "lora.md"},
    {"qlora", "the loss beside lora's, before and after: adapters make up for what 4 bits cost",
     "pacer::modules::quantize(*model, pacer::modules::Nf4Options().targets({\"*\"}));\n"
     "pacer::modules::add_lora(*model, pacer::modules::LoraOptions(8).targets({\"*\"}));",
     "lora.md"},
    {"pipeline", "the loss is fused-adamw's; ranks that share out layers send activations, not gradients",
     "auto world = pacer::Communicator::from_environment();\n"
     "pacer::Pipeline pipeline(*model, model->blocks, &BlockImpl::forward,\n"
     "                         pacer::Grid(world, world->world_size()), pacer::one_f_one_b(8));",
     "pipeline.md"},
};

constexpr size_t kWidestLine = 100;  // characters of a line

// The words in lines of at most kWidestLine characters, those after the first indented.
std::string wrapped(const std::string& words) {
  std::istringstream in(words);
  std::string text, line, word;
  while (in >> word) {
    if (!line.empty() && line.size() + 1 + word.size() > kWidestLine) {
      text += line + '\n';
      line = "   ";
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return text + line + '\n';
}

// The code, indented, with its page as a comment behind the last line where it fits.
std::string code_lines(const Hint& hint) {
  const std::string indent = "    ", page = "// docs/" + hint.page;
  std::istringstream in(hint.code);
  std::string text, line;
  size_t last = 0;
  while (std::getline(in, line)) {
    text += (text.empty() ? "" : "\n") + indent + line;
    last = indent.size() + line.size();
  }
  return text + (last + 2 + page.size() <= kWidestLine ? "  " : "\n" + indent) + page + '\n';
}

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
    text += wrapped(hint.arm + ": " + hint.text);
    if (!hint.code.empty()) text += code_lines(hint);
  }
  return text.empty()
             ? text
             : "What to look at, and what to type next, where model and session are yours:\n\n" + text;
}

}  // namespace convergence
