#include "fine_tuning.h"

#include <torch/utils.h>

#include <pacer/checkpoints/load_weights.h>
#include <pacer/core/error.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

namespace convergence {

void begin_from(const std::filesystem::path& weights, const Arm& arm, const Settings& settings, Gpt* model) {
  // By order and not by name, because the layers of fused blocks have other names.
  Gpt base(GptConfig{settings.layers, settings.width, settings.heads, settings.sequence});
  pacer::load_weights(*base, weights.string());
  const auto from = base->parameters(), to = (*model)->parameters();
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  if (arm.has(Method::four_bits))
    pacer::modules::quantize(**model, pacer::modules::Nf4Options().targets({"*"}));
  if (arm.has(Method::adapters)) {
    const auto alpha = 2.0 * static_cast<double>(settings.lora_rank);
    pacer::modules::add_lora(**model,
                             pacer::modules::LoraOptions(settings.lora_rank).alpha(alpha).targets({"*"}));
  }
}

void check_fine_tuning(const Settings& settings) {
  for (const std::string& arm : settings.arms) {
    pacer::require(settings.fine_tune || !find_arm(arm).has(Method::adapters), "the arm '", arm,
                   "' trains adapters of a model that has learned something; add --fine-tune");
  }
}

}  // namespace convergence
