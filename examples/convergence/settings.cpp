// The presets, the checks between settings and the learning-rate schedule.
#include "settings.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include <pacer/core/error.h>

#include "support/nearest_name.h"

namespace convergence {
namespace {

constexpr int64_t kKilo = 1000;
constexpr int64_t kMega = 1000 * kKilo;
constexpr int64_t kDefaultEvaluations = 16;
constexpr double kWarmUpFraction = 0.05;
constexpr int64_t kCurriculumFraction = 8;  // of the full length, to start with
constexpr int64_t kShortest = 8;            // bytes
constexpr int64_t kFineTuneFraction = 4;    // of the base's budget

Settings tiny() {
  Settings settings;
  settings.preset = "tiny";
  settings.data_limit = 8 * kMega;
  settings.layers = 2;
  settings.width = 128;
  settings.heads = 4;
  settings.sequence = 64;
  settings.batch = 8;
  settings.tokens = 1000 * kKilo;
  settings.learning_rate = 3e-3;
  settings.arms = {"fused-adamw", "curriculum-reshape", "onebit-adam", "lamb", "onebit-lamb"};
  // The best of the ramps that were measured (docs/measurements/study.md); longer ones cost loss here.
  settings.curriculum_start = 16;
  settings.curriculum_share = 0.3;
  settings.validation_sequences = 256;
  // Its matrices are so small that a second thread gains half a core at best, and on a machine with other
  // work loses far more than that by waiting for its turn.
  settings.threads = 1;
  return settings;
}

Settings small() {
  Settings settings;
  settings.preset = "small";
  settings.data_limit = 64 * kMega;
  settings.layers = 12;
  settings.width = 768;
  settings.heads = 12;
  settings.sequence = 1024;
  settings.batch = 32;
  settings.tokens = 50 * kMega;
  settings.learning_rate = 6e-4;
  settings.validation_sequences = 128;
  return settings;
}

}  // namespace

int64_t Settings::warmup_steps() const {
  return static_cast<int64_t>(std::ceil(kWarmUpFraction * static_cast<double>(steps())));
}

int64_t Settings::tokens_between_evaluations() const {
  return evaluate_every > 0 ? evaluate_every : (tokens + kDefaultEvaluations - 1) / kDefaultEvaluations;
}

int64_t Settings::first_length() const {
  if (curriculum_start > 0) return curriculum_start;
  return std::min(sequence, std::max(kShortest, sequence / kCurriculumFraction));
}

double Settings::gamma() const {
  return layer_drop_gamma > 0.0 ? layer_drop_gamma : 100.0 / static_cast<double>(steps());
}

int64_t Settings::freeze_step() const {
  return std::max<int64_t>(1, std::llround(onebit_freeze * static_cast<double>(steps())));
}

Settings Settings::for_fine_tuning() const {
  Settings settings = *this;
  const auto scripts = std::filesystem::path(PACER_TORCH_INCLUDE_DIR).parent_path() / "share" / "cmake";
  settings.data = fine_tune_data.empty() ? scripts.string() : fine_tune_data;
  settings.tokens = fine_tune_tokens > 0 ? fine_tune_tokens : tokens / kFineTuneFraction;
  if (fine_tune_rate > 0.0) settings.learning_rate = fine_tune_rate;
  return settings;
}

std::vector<PresetHelp> preset_help() {
  return {{"tiny", "for a CPU: 2 layers of width 128, sequences of 64 bytes, 1M tokens per run"},
          {"small",
           "for a GPU: GPT-2 small, 12 layers of width 768, sequences of 1024 bytes, 50M tokens per run"}};
}

Settings preset_settings(const std::string& name, bool quick, bool fine_tune) {
  std::vector<std::string> names;
  for (const auto& preset : preset_help()) names.push_back(preset.name);
  pacer::require(name == "tiny" || name == "small", "there is no preset '", name, "'; ",
                 examples::suggestion(name, names));
  Settings settings = name == "tiny" ? tiny() : small();
  settings.quick = quick;
  if (quick) {
    settings.arms = {"fused-adamw",        "adamw",     "muon",  "onebit-adam",
                     "curriculum-reshape", "recompute", "shards"};
    settings.tokens = name == "tiny" ? 300 * kKilo : 4 * kMega;
    settings.validation_sequences = name == "tiny" ? 128 : 64;
  }
  settings.fine_tune = fine_tune;
  if (fine_tune) settings.arms = {"fused-adamw", "lora", "qlora"};
  return settings;
}

void check_settings(const Settings& settings) {
  pacer::require(settings.width % settings.heads == 0, "the width (", settings.width,
                 ") must be a multiple of the number of heads (", settings.heads, ")");
  pacer::require(settings.tokens >= settings.tokens_per_step(), "the budget of ", settings.tokens,
                 " tokens does not hold one step of ", settings.batch, " sequences of ", settings.sequence,
                 " bytes; raise tokens or lower batch or sequence");
  pacer::require(!settings.fine_tune || settings.lora_rank <= settings.width, "adapters of rank ",
                 settings.lora_rank, " are larger than the width (", settings.width, "); lower lora-rank");
  pacer::require(!settings.fine_tune || settings.for_fine_tuning().tokens >= settings.tokens_per_step(),
                 "the budget of ", settings.for_fine_tuning().tokens,
                 " tokens for fine-tuning does not hold one step of ", settings.batch, " sequences of ",
                 settings.sequence, " bytes; raise fine-tune-tokens");
  pacer::require(settings.processes == 0 || settings.batch % settings.processes == 0, "the batch of ",
                 settings.batch, " sequences cannot be shared evenly by ", settings.processes,
                 " processes; choose batch or processes so that it can");
  pacer::require(settings.processes == 0 || settings.ranks_per_node == 0 ||
                     settings.processes % settings.ranks_per_node == 0,
                 settings.processes, " processes cannot be nodes of ", settings.ranks_per_node,
                 " each; choose processes or ranks-per-node so that they can");
  pacer::require(settings.layer_drop_gamma == 0.0 || settings.layer_drop_time == "rising",
                 "layer-drop-gamma is how fast a rising drop rises, but layer-drop-time is ",
                 settings.layer_drop_time, "; leave one of them out");
  pacer::require(settings.curriculum_start <= settings.sequence, "the curriculum cannot start at ",
                 settings.curriculum_start, " bytes: sequences have ", settings.sequence,
                 "; lower curriculum-start");
}

}  // namespace convergence
