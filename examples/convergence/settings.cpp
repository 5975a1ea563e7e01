// The presets, the checks between settings and the learning-rate schedule.
#include "settings.h"

#include <algorithm>
#include <cmath>

#include <pacer/core/error.h>

#include "nearest_name.h"

namespace convergence {
namespace {

constexpr int64_t kKilo = 1000;
constexpr int64_t kMega = 1000 * kKilo;
constexpr int64_t kDefaultEvaluations = 16;
constexpr double kWarmUpFraction = 0.05;
constexpr double kFinalFraction = 0.1;  // of the peak learning rate
constexpr double kPi = 3.14159265358979323846;

Settings tiny() {
  Settings settings;
  settings.preset = "tiny";
  settings.data_limit = 8 * kMega;
  settings.layers = 2;
  settings.width = 128;
  settings.heads = 4;
  settings.sequence = 64;
  settings.batch = 8;
  settings.tokens = 2500 * kKilo;
  settings.learning_rate = 3e-3;
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

int64_t Settings::steps_between_evaluations() const {
  if (evaluate_every == 0) return (steps() + kDefaultEvaluations - 1) / kDefaultEvaluations;
  return std::max<int64_t>(1, evaluate_every / tokens_per_step());
}

std::vector<PresetHelp> preset_help() {
  return {{"tiny", "for a CPU: 2 layers of width 128, sequences of 64 bytes, 2.5M tokens per run"},
          {"small",
           "for a GPU: GPT-2 small, 12 layers of width 768, sequences of 1024 bytes, 50M tokens per run"}};
}

Settings preset_settings(const std::string& name, bool quick) {
  std::vector<std::string> names;
  for (const auto& preset : preset_help()) names.push_back(preset.name);
  pacer::require(name == "tiny" || name == "small", "there is no preset '", name, "'; ",
                 suggestion(name, names));
  Settings settings = name == "tiny" ? tiny() : small();
  settings.quick = quick;
  if (quick) {
    settings.tokens = name == "tiny" ? 600 * kKilo : 4 * kMega;
    settings.validation_sequences = name == "tiny" ? 128 : 64;
  }
  return settings;
}

void check_settings(const Settings& settings) {
  pacer::require(settings.width % settings.heads == 0, "the width (", settings.width,
                 ") must be a multiple of the number of heads (", settings.heads, ")");
  pacer::require(settings.tokens >= settings.tokens_per_step(), "the budget of ", settings.tokens,
                 " tokens does not hold one step of ", settings.batch, " sequences of ", settings.sequence,
                 " bytes; raise tokens or lower batch or sequence");
}

double learning_rate_at(int64_t step, int64_t steps, double peak) {
  const double warm_up_steps = std::ceil(kWarmUpFraction * static_cast<double>(steps));
  const double position = static_cast<double>(step);
  if (position < warm_up_steps) return peak * (position + 1.0) / warm_up_steps;
  const double progress =
      (position - warm_up_steps) / std::max(1.0, static_cast<double>(steps) - warm_up_steps);
  return peak * (kFinalFraction + (1.0 - kFinalFraction) * 0.5 * (1.0 + std::cos(kPi * progress)));
}

}  // namespace convergence
