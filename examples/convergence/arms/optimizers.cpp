#include "optimizers.h"

#include <algorithm>
#include <optional>

#include <torch/optim/adamw.h>

#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_muon.h>

#include "clipping_ratio.h"

namespace convergence {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;
// Of 1, 2, 4 and 8 the best for the tiny preset at 300k tokens. LAMB moves a matrix by this share of its own
// size.
constexpr double kLambRate = 4.0;  // in units of the learning rate of the others

constexpr double kLoraRate = 4.0;  // in the same units

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// One group with decay, one without.
template <class Options>
ParamGroups groups_of(const OptimizerRecipe& recipe, Options options) {
  ParamGroups groups;
  options.weight_decay(recipe.settings.weight_decay);
  groups.emplace_back(recipe.decayed, std::make_unique<Options>(options));
  options.weight_decay(0.0);
  groups.emplace_back(recipe.undecayed, std::make_unique<Options>(options));
  return groups;
}

// The same recipe; biases and gains also have no trust ratio.
template <class Options>
ParamGroups lamb_groups(const OptimizerRecipe& recipe, const Options& options) {
  ParamGroups groups = groups_of(recipe, options);
  static_cast<Options&>(groups.back().options()).adapt(false);
  return groups;
}

template <class Options>
Options adamw_options(const OptimizerRecipe& recipe) {
  return Options(recipe.settings.learning_rate).betas({kBeta1, kBeta2}).eps(kEpsilon);
}

// For every optimizer with the options of AdamW.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_adamw(const OptimizerRecipe& recipe) {
  const auto options = adamw_options<Options>(recipe);
  return std::make_unique<Optimizer>(groups_of(recipe, options), options);
}

std::unique_ptr<torch::optim::Optimizer> make_adamw_8bit(const OptimizerRecipe& recipe) {
  const auto options = adamw_options<pacer::FusedAdamWOptions>(recipe).state_bits(8);
  return std::make_unique<pacer::FusedAdamW>(groups_of(recipe, options), options);
}

std::unique_ptr<torch::optim::Optimizer> make_lamb(const OptimizerRecipe& recipe) {
  auto options = pacer::FusedLambOptions(kLambRate * recipe.settings.learning_rate).betas({kBeta1, kBeta2});
  options.max_coeff(recipe.settings.lamb_max_coeff);
  return std::make_unique<pacer::FusedLamb>(lamb_groups(recipe, options), options);
}

template <class Options>
Options muon_options(const OptimizerRecipe& recipe) {
  const Settings& settings = recipe.settings;
  return Options(settings.learning_rate)
      .betas({kBeta1, kBeta2})
      .eps(kEpsilon)
      .weight_decay(settings.weight_decay);
}

// Hidden matrices by Muon's rule, query, key and value each by itself; embeddings, biases and gains by AdamW's.
template <class Options>
ParamGroups muon_groups(const OptimizerRecipe& recipe, const Options& options) {
  std::vector<torch::Tensor> hidden, in_three, embeddings;
  for (const torch::Tensor& matrix : recipe.decayed) {
    const bool is_embedding = matrix.is_same(recipe.bytes) || matrix.is_same(recipe.positions);
    const bool is_fused = matrix.size(0) == 3 * matrix.size(1);
    (is_embedding ? embeddings : is_fused ? in_three : hidden).push_back(matrix);
  }
  const auto others = Options(options).orthogonalize(false);
  ParamGroups groups;
  groups.emplace_back(hidden, std::make_unique<Options>(options));
  groups.emplace_back(in_three, std::make_unique<Options>(Options(options).split(3)));
  groups.emplace_back(embeddings, std::make_unique<Options>(others));
  groups.emplace_back(recipe.undecayed, std::make_unique<Options>(Options(others).weight_decay(0)));
  return groups;
}

std::unique_ptr<torch::optim::Optimizer> make_muon(const OptimizerRecipe& recipe, bool normalize_rows) {
  const auto options = muon_options<pacer::MuonOptions>(recipe).normalize_rows(normalize_rows);
  return std::make_unique<pacer::Muon>(muon_groups(recipe, options), options);
}

std::unique_ptr<torch::optim::Optimizer> make_onebit_muon(const OptimizerRecipe& recipe) {
  const auto options = muon_options<pacer::OneBitMuonOptions>(recipe).compress_alone(true);
  return std::make_unique<pacer::OneBitMuon>(muon_groups(recipe, options), options, recipe.world);
}

// Adapters do not decay: that would pull towards the base.
std::unique_ptr<torch::optim::Optimizer> make_lora(const OptimizerRecipe& recipe) {
  const auto options = pacer::FusedAdamWOptions(kLoraRate * recipe.settings.learning_rate)
                           .betas({kBeta1, kBeta2})
                           .eps(kEpsilon)
                           .weight_decay(0.0);
  return std::make_unique<pacer::FusedAdamW>(recipe.decayed, options);
}

template <class Options>
void cut_into_buckets(const OptimizerRecipe& recipe, Options& options) {
  if (recipe.settings.onebit_bucket > 0) options.bucket_bytes(recipe.settings.onebit_bucket);
}

template <class Options>
void freeze_within(const OptimizerRecipe& recipe, Options& options) {
  constexpr int64_t kFewestSteps = 4;
  options.freeze_step(std::nullopt).freeze_automatically(std::max(kFewestSteps, recipe.settings.steps()));
}

template <class Optimizer>
OptimizerMaker make_onebit_adam(const OneBitChange& change, Positions positions) {
  return [change, positions](const OptimizerRecipe& recipe) {
    using Options = pacer::OneBitAdamOptions;
    const Settings& settings = recipe.settings;
    auto options = Options(settings.learning_rate).betas({kBeta1, kBeta2}).eps(kEpsilon);
    options.freeze_step(settings.freeze_step()).variance_floor(settings.onebit_floor);
    options.compress_alone(true).weight_decay(settings.weight_decay);
    cut_into_buckets(recipe, options);
    if (change) change(recipe, options);
    ParamGroups groups = groups_of(recipe, options);
    if (positions == Positions::full_precision) {
      auto& others = groups.front().params();
      const auto is_position = [&](const torch::Tensor& tensor) { return tensor.is_same(recipe.positions); };
      others.erase(std::remove_if(others.begin(), others.end(), is_position), others.end());
      groups.emplace(groups.begin() + 1, std::vector<torch::Tensor>{recipe.positions},
                     std::make_unique<Options>(Options(options).compress(false)));
    }
    return std::make_unique<Optimizer>(groups, options, recipe.world);
  };
}

}  // namespace

OptimizerMaker torch_adamw() { return make_adamw<torch::optim::AdamW, torch::optim::AdamWOptions>; }

OptimizerMaker fused_adamw() { return make_adamw<pacer::FusedAdamW, pacer::FusedAdamWOptions>; }

OptimizerMaker adamw_8bit() { return make_adamw_8bit; }

OptimizerMaker lamb() { return make_lamb; }

OptimizerMaker muon() {
  return [](const OptimizerRecipe& recipe) { return make_muon(recipe, /*normalize_rows=*/false); };
}

OptimizerMaker normuon() {
  return [](const OptimizerRecipe& recipe) { return make_muon(recipe, /*normalize_rows=*/true); };
}

OptimizerMaker onebit_muon() { return make_onebit_muon; }

OptimizerMaker lora() { return make_lora; }

OptimizerMaker onebit_adam(const OneBitChange& change, Positions positions) {
  return make_onebit_adam<pacer::OneBitAdam>(change, positions);
}

OptimizerMaker probing_onebit_adam() {
  return make_onebit_adam<ProbingOneBitAdam>({}, Positions::compressed);
}

// Its bias correction is off by default; here its warm-up is that of lamb().
OptimizerMaker onebit_lamb(Freeze freeze, Workers workers) {
  return [freeze, workers](const OptimizerRecipe& recipe) {
    const Settings& settings = recipe.settings;
    pacer::OneBitLambOptions options(kLambRate * recipe.settings.learning_rate);
    options.betas({kBeta1, kBeta2})
        .bias_correction(true)
        .max_coeff(recipe.settings.lamb_max_coeff)
        .variance_floor(settings.onebit_floor);
    options.freeze_step(settings.freeze_step()).compress_alone(true).factor_max(settings.lamb_max_factor);
    options.hierarchical(workers == Workers::nodes);
    cut_into_buckets(recipe, options);
    if (freeze == Freeze::automatically) freeze_within(recipe, options);
    return std::make_unique<pacer::OneBitLamb>(lamb_groups(recipe, options), options, recipe.world);
  };
}

void freeze_automatically(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options) {
  freeze_within(recipe, options);
}

}  // namespace convergence
