#include "parts.h"

#include <vector>

namespace info {
namespace {

struct Part {
  const char* name;
  const char* slot;  // of a hook; empty for the others
  const char* meaning;
};

const std::vector<Part> kOptimizers = {
    {"FusedAdam", "", "Adam with L2 regularization, one kernel for all tensors"},
    {"FusedAdamW", "", "Adam with decoupled weight decay, one kernel for all tensors"},
    {"FusedLamb", "", "LAMB for large batches: a trust ratio for each tensor"},
    {"FusedSgd", "", "SGD with momentum, one kernel for all tensors"},
    {"FusedRmsprop", "", "RMSprop, also centered and with momentum, one kernel for all tensors"},
    {"Muon", "", "Muon for hidden matrices, AdamW for the rest"},
    {"ScheduleFreeAdamW", "", "AdamW without a schedule: what is evaluated is an average of the weights"},
    {"OneBitAdam", "", "AdamW whose momentum travels as signs, for many ranks or slow networks"},
    {"OneBitLamb", "", "LAMB whose momentum travels as signs"},
    {"OneBitMuon", "", "Muon whose directions travel as signs, from the first step on"}};

const std::vector<Part> kHooks = {
    {"EpochSampler", "data", "the order of the data, which resumes in the middle of an epoch"},
    {"LengthBuckets", "data", "the same in batches of similar length, so that little of them is padding"},
    {"SequenceLength", "data", "a curriculum from short sequences to the full length"},
    {"LayerDrop", "forward", "deep blocks are skipped more and more often"},
    {"WindowLength", "forward",
     "a curriculum whose sequences stay whole: attention looks back further and further"},
    {"Precision", "forward", "forward in bf16, fp16 with loss scaling, or 8-bit floats"},
    {"Recompute", "forward", "activations computed again in backward instead of kept"},
    {"GradientAccumulation", "loss", "several micro-batches a step"},
    {"DataParallel", "reduce", "ranks train one model on their own parts of the data"},
    {"Pipeline", "reduce", "stages of a model on different ranks"},
    {"Shards", "reduce", "each rank has its part of state, gradients or parameters"},
    {"GradientClipping", "clip", "gradients are cut to a global norm, or to norms of groups"},
    {"WeightAverage", "optimize", "an average of the weights, which evaluation sees"},
    {"GradientRelease", "optimize", "parameters updated while backward runs, and no gradients kept"},
    {"CudaGraph", "optimize", "the optimizer's kernels replayed by one call"},
    {"LearningRate", "schedule", "sets the rate from a schedule"},
    {"Vary", "schedule", "weight decay, momentum, a beta or any other number follows a schedule"},
    {"Validation", "validate", "measures the model now and then"},
    {"EarlyStopping", "decide", "asks for the end where validation no longer improves"},
    {"SaveBest", "decide", "keeps the weights of the best model so far"},
    {"Metrics", "record", "JSON lines, CSV, TensorBoard and a progress bar"},
    {"Checkpoints", "checkpoint", "saves everything that an exact resume needs"}};

const std::vector<Part> kSchedules = {
    {"constant_schedule", "", "warm-up, then the peak"},
    {"warmup_linear", "", "warm-up, then a straight line to the end"},
    {"warmup_cosine", "", "warm-up, then half a cosine"},
    {"warmup_polynomial", "", "warm-up, then a power of what remains"},
    {"warmup_exponential", "", "warm-up, then a factor every so many steps"},
    {"warmup_inverse_sqrt", "", "warm-up, then one over the root of the steps"},
    {"warmup_stable_decay", "", "warm-up, the peak, then a decay in the last steps"},
    {"warmup_cosine_restarts", "", "warm-up, then half a cosine again and again"},
    {"one_cycle", "", "up and down by cosine or line, as torch's OneCycleLR"},
    {"custom_schedule", "", "a function of yours of the steps"},
    {"custom_schedule_by_tokens", "", "the same of the tokens"}};

std::string lines(const std::string& title, const std::vector<Part>& parts) {
  constexpr size_t kNameColumns = 27, kSlotColumns = 12;
  std::string text = title + ":\n";
  const auto padded = [](std::string word, size_t columns) {
    return word.append(columns - word.size(), ' ');
  };
  for (const Part& part : parts) {
    text += "  " + padded(part.name, kNameColumns);
    if (*part.slot != '\0') text += padded(part.slot, kSlotColumns);
    text += part.meaning + std::string("\n");
  }
  return text;
}

}  // namespace

std::string list_of_parts() {
  return lines("Optimizers", kOptimizers) + "\n" + lines("Hooks, with their slots in a step", kHooks) + "\n" +
         lines("Learning-rate schedules", kSchedules);
}

}  // namespace info
