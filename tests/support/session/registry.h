// Every optimizer and every hook, for the tests that must hold for all of them: a new one is tested before
// anybody writes a test for it. Add it to all_optimizers() or all_hooks().
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/checkpoints/all.h>
#include <pacer/hooks/hooks.h>
#include <pacer/metrics/all.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_muon.h>
#include <pacer/optimizers/schedule_free.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>

#include "own_optimizer/lion.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing {

using OptimizerMaker = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const NamedParameters&, const std::shared_ptr<Communicator>&)>;

struct RegisteredOptimizer {
  std::string name;  // its class, and behind a space what sets a form of its rule apart
  bool is_own;       // one of pacer's
  OptimizerMaker make;
  at::ScalarType dtype = at::kFloat;  // of the parameters
  bool has_ranks = false;   // it exchanges more than gradients, so that ranks differ from one process
  bool in_buckets = false;  // each parameter's momentum travels by itself
  bool averages = false;    // it averages the weights itself
};

// Two groups with different options: matrices, and vectors such as biases.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> two_groups(const NamedParameters& parameters,
                                                          const Options& of_matrices,
                                                          const Options& of_vectors) {
  std::vector<Tensor> matrices, vectors;
  for (const auto& item : parameters) (item.value().dim() >= 2 ? matrices : vectors).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(of_matrices));
  groups.emplace_back(vectors, std::make_unique<Options>(of_vectors));
  return groups;
}

template <class Optimizer, class Options>
OptimizerMaker making(const Options& options, const Options& of_vectors) {
  return [options, of_vectors](
             const NamedParameters& parameters,
             const std::shared_ptr<Communicator>&) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(two_groups(parameters, options, of_vectors), options);
  };
}
// Vectors without weight decay.
template <class Optimizer, class Options>
OptimizerMaker making(const Options& options) {
  return making<Optimizer>(options, Options(options).weight_decay(0));
}

// The same with the options of the vectors as the optimizer's defaults, which groups take what they leave as it was constructed
// from where torch has such an optimizer: an option that only matrices have on stays theirs.
template <class Optimizer, class Options>
OptimizerMaker making_two_kinds(const Options& of_matrices, const Options& of_vectors) {
  return [=](const NamedParameters& parameters,
             const std::shared_ptr<Communicator>&) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(two_groups(parameters, of_matrices, of_vectors), of_vectors);
  };
}

// Matrices compressed, biases in full precision and without weight decay; frozen after two steps, whatever
// moves.
template <class Optimizer, class Options>
OptimizerMaker making_onebit(const Options& options) {
  const auto shared = Options(options).freeze_step(2).allow_early_freeze(true);
  return [shared](const NamedParameters& parameters,
                  const std::shared_ptr<Communicator>& world) -> std::unique_ptr<torch::optim::Optimizer> {
    const auto of_vectors = Options(shared).weight_decay(0).compress(false);
    return std::make_unique<Optimizer>(two_groups(parameters, shared, of_vectors), shared, world);
  };
}

// Matrices with Muon's rule, biases with AdamW's and without weight decay.
inline OptimizerMaker making_muon(const MuonOptions& options) {
  return making<Muon>(options, MuonOptions(options).orthogonalize(false).weight_decay(0));
}
// Whose ranks share the products.
inline OptimizerMaker making_shared_muon(const MuonOptions& options) {
  return [make = making_muon(options)](const NamedParameters& parameters,
                                       const std::shared_ptr<Communicator>& world) {
    auto optimizer = make(parameters, world);
    static_cast<Muon&>(*optimizer).share_products(world);
    return optimizer;
  };
}
inline OptimizerMaker making_onebit_muon(const OneBitMuonOptions& options) {
  return [options](const NamedParameters& parameters,
                   const std::shared_ptr<Communicator>& world) -> std::unique_ptr<torch::optim::Optimizer> {
    const auto of_vectors = OneBitMuonOptions(options).orthogonalize(false).weight_decay(0);
    return std::make_unique<OneBitMuon>(two_groups(parameters, options, of_vectors), options, world);
  };
}

inline std::vector<RegisteredOptimizer> all_optimizers() {
  const FusedAdamWOptions adamw = FusedAdamWOptions(0.01).weight_decay(0.1).finite_check(true);
  const auto stochastic =
      FusedAdamWOptions(adamw).master_weights(MasterWeights::none).rounding(Rounding::stochastic);
  const auto nearest = FusedAdamWOptions(adamw).master_weights(MasterWeights::none);
  const FusedLambOptions lamb = FusedLambOptions(0.01).weight_decay(0.1).finite_check(true);
  const auto sgd = FusedSgdOptions(0.01).momentum(0.9).dampening(0.2).weight_decay(0.1).finite_check(true);
  const auto rmsprop = FusedRmspropOptions(0.002).alpha(0.9).weight_decay(0.1).finite_check(true);
  const auto onebit_adam = OneBitAdamOptions(0.01).weight_decay(0.1);
  const auto onebit_lamb = OneBitLambOptions(0.01).weight_decay(0.1).factor_max(4);
  using namespace torch::optim;
  return {
      {"FusedAdamW", true, making<FusedAdamW>(adamw)},
      {"FusedAdam", true, making<FusedAdam>(FusedAdamOptions(0.01).weight_decay(0.1).finite_check(true))},
      {"FusedAdam amsgrad", true, making<FusedAdam>(FusedAdamOptions(0.01).amsgrad(true).finite_check(true))},
      {"FusedAdamW bf16 remainder", true, making<FusedAdamW>(adamw), at::kBFloat16},
      {"FusedAdamW bf16 master", true,
       making<FusedAdamW>(FusedAdamWOptions(adamw).master_weights(MasterWeights::fp32)), at::kBFloat16},
      {"FusedAdamW bf16 stochastic", true, making<FusedAdamW>(stochastic), at::kBFloat16},
      {"FusedAdamW bf16 nearest", true, making<FusedAdamW>(nearest), at::kBFloat16},
      {"FusedAdamW 8 bits", true, making<FusedAdamW>(FusedAdamWOptions(adamw).state_bits(8))},
      {"FusedAdam bf16 8 bits", true,
       making<FusedAdam>(FusedAdamOptions(0.01).weight_decay(0.1).finite_check(true).state_bits(8)),
       at::kBFloat16},
      {"FusedAdamW bf16 8-bit remainder", true,
       making<FusedAdamW>(FusedAdamWOptions(adamw).master_weights(MasterWeights::remainder_8)),
       at::kBFloat16},
      {"FusedAdamW bf16 8 bits, 8-bit remainder", true,
       making<FusedAdamW>(FusedAdamWOptions(adamw).state_bits(8).master_weights(MasterWeights::remainder_8)),
       at::kBFloat16},
      {"FusedLamb", true, making<FusedLamb>(lamb)},
      {"FusedSgd", true, making<FusedSgd>(sgd)},
      {"FusedSgd nesterov bf16 remainder", true,
       making<FusedSgd>(FusedSgdOptions(sgd).dampening(0).nesterov(true)), at::kBFloat16},
      {"FusedSgd maximize", true, making<FusedSgd>(FusedSgdOptions(sgd).maximize(true))},
      // Vectors without a momentum, so that some parameters have a state without tensors.
      {"FusedSgd of two kinds", true, making_two_kinds<FusedSgd>(sgd, FusedSgdOptions(sgd).momentum(0))},
      {"FusedSgd bf16 stochastic", true,
       making<FusedSgd>(
           FusedSgdOptions(sgd).master_weights(MasterWeights::none).rounding(Rounding::stochastic)),
       at::kBFloat16},
      // Matrices with all three tensors of state, vectors with one.
      {"FusedRmsprop", true,
       making_two_kinds<FusedRmsprop>(FusedRmspropOptions(rmsprop).momentum(0.5).centered(true), rmsprop)},
      {"FusedLamb 8 bits", true, making<FusedLamb>(FusedLambOptions(lamb).state_bits(8))},
      {"Muon", true,
       making_muon(MuonOptions(0.01).weight_decay(0.1).precision(MuonPrecision::fp32).finite_check(true))},
      {"Muon 8 bits", true,
       making_muon(MuonOptions(0.01)
                       .weight_decay(0.1)
                       .precision(MuonPrecision::fp32)
                       .finite_check(true)
                       .state_bits(8))},
      {"Muon bf16 remainder", true,
       making_muon(MuonOptions(0.01)
                       .nesterov(false)
                       .normalize_rows(true)
                       .row_beta(0.8)
                       .precision(MuonPrecision::fp32)
                       .finite_check(true)),
       at::kBFloat16},
      {"Muon shared", true,
       making_shared_muon(
           MuonOptions(0.01).weight_decay(0.1).precision(MuonPrecision::fp32).finite_check(true))},
      {"OneBitMuon", true,
       making_onebit_muon(
           OneBitMuonOptions(0.01).weight_decay(0.1).precision(MuonPrecision::fp32).compress_alone(true)),
       at::kFloat, true},
      {"ScheduleFreeAdamW", true,
       making<ScheduleFreeAdamW>(
           ScheduleFreeAdamWOptions(0.01).weight_decay(0.1).warmup_steps(3).finite_check(true)),
       at::kFloat, false, false, true},
      {"ScheduleFreeAdamW bf16 remainder", true,
       making<ScheduleFreeAdamW>(
           ScheduleFreeAdamWOptions(0.01).betas({0.8, 0.99}).r(1.5).weight_lr_power(0.5).finite_check(true)),
       at::kBFloat16, false, false, true},
      // A rule that is not pacer's.
      {"Lion", true, making<Lion>(lion_options(0.01).weight_decay(0.1).finite_check(true))},
      {"OneBitAdam", true, making_onebit<OneBitAdam>(OneBitAdamOptions(onebit_adam).compress_alone(true)),
       at::kFloat, true},
      {"OneBitAdam refreshed", true,
       making_onebit<OneBitAdam>(OneBitAdamOptions(0.01)
                                     .compress_alone(true)
                                     .refresh_variance_every(3)
                                     .block_scales(false)
                                     .bucket_bytes(1)),
       at::kBFloat16, true, true},
      {"OneBitAdam uncompressed", true, making_onebit<OneBitAdam>(onebit_adam), at::kFloat, true},
      {"OneBitLamb", true, making_onebit<OneBitLamb>(OneBitLambOptions(onebit_lamb).compress_alone(true)),
       at::kFloat, true},
      {"OneBitLamb by blocks", true,
       making_onebit<OneBitLamb>(OneBitLambOptions(onebit_lamb)
                                     .compress_alone(true)
                                     .block_scales(true)
                                     .bias_correction(true)
                                     .bucket_bytes(1)),
       at::kBFloat16, true, true},
      {"OneBitLamb uncompressed", true, making_onebit<OneBitLamb>(onebit_lamb), at::kFloat, true},
      {"FusedLamb bf16 remainder", true, making<FusedLamb>(lamb), at::kBFloat16},
      {"AdamW", false, making<AdamW>(AdamWOptions(0.01).weight_decay(0.1))},
      {"Adam", false, making<Adam>(AdamOptions(0.01).amsgrad(true))},
      {"SGD", false, making<SGD>(SGDOptions(0.1).momentum(0.9))},
      {"RMSprop", false, making<RMSprop>(RMSpropOptions(0.002).momentum(0.5).centered(true))},
      {"Adagrad", false, making<Adagrad>(AdagradOptions(0.05))},
  };
}

// In one process they are what they are without nodes, so that they are not among the others.
inline std::vector<RegisteredOptimizer> optimizers_by_nodes() {
  const auto adam = OneBitAdamOptions(0.01).weight_decay(0.1).compress_alone(true).hierarchical(true);
  const auto lamb =
      OneBitLambOptions(0.01).weight_decay(0.1).factor_max(4).compress_alone(true).hierarchical(true);
  return {{"OneBitAdam by nodes", true, making_onebit<OneBitAdam>(adam), at::kFloat, true},
          {"OneBitLamb by nodes, bf16", true, making_onebit<OneBitLamb>(lamb), at::kBFloat16, true}};
}

struct RegisteredHook {
  std::string name;
  // May be used together with hooks of another kind only.
  std::string kind;
  bool has_guard;  // it skips steps whose gradients are not finite
  std::function<void(Session&, SmallModel&, EpochSampler&)> use;
  bool needs_gates = false;
  bool needs_fused_layers = false;
  // Before the optimizer is made, of what then requires a gradient; the second argument is the dropout.
  std::function<void(SmallModel&, double)> change_model = nullptr;
  // Of this rank, in place of the one that the others get; hands out at most two examples at a time.
  std::function<EpochSampler(const Communicator&)> make_sampler = nullptr;
};

inline std::vector<RegisteredHook> all_hooks() {
  const auto lengths = [](LengthMode mode) {
    return SequenceLength(SequenceLengthOptions(4, kFullLength).ramp_steps(6).difficulty_step(2).mode(mode));
  };
  return {
      {"accumulation", "accumulation", false,
       [](Session& s, SmallModel&, EpochSampler&) { s.use(GradientAccumulation(3)); }},
      {"accumulation by tokens", "accumulation", false,
       [](Session& s, SmallModel&, EpochSampler&) {
         s.use(GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(true)));
       }},
      {"accumulation that grows", "accumulation", false,
       [](Session& s, SmallModel&, EpochSampler&) {
         s.use(GradientAccumulation(BatchSchedule(1).table({{1, 3}, {4, 2}})));
       }},
      {"average of weights", "average", false,
       [](Session& s, SmallModel&, EpochSampler&) {
         try {
           s.use(WeightAverage(ema(0.9).warm_up(true)));
         } catch (const InvalidArgument& error) {  // one average is enough
           if (std::string(error.what()).find("averages the weights itself") == std::string::npos) throw;
         }
       }},
      {"clipping", "clipping", true,
       [](Session& s, SmallModel&, EpochSampler&) { s.use(GradientClipping(0.3)); }},
      {"clipping by the norm before", "clipping", true,
       [](Session& s, SmallModel&, EpochSampler&) {
         s.use(GradientClipping(GradientClippingOptions(0.3).by_previous_norm(true)));
       }},
      {"clipping of a group by another norm", "clipping", true,
       [](Session& s, SmallModel&, EpochSampler&) {
         try {
           s.use(GradientClipping(GradientClippingOptions(0.3).norm_type(1).group(0)));
         } catch (const InvalidArgument& error) {  // its ranks do not average gradients
           if (std::string(error.what()).find("1-bit optimizer") == std::string::npos) throw;
           s.use(GradientClipping(0.3));
         }
       }},
      {"bf16", "precision", false, [](Session& s, SmallModel&, EpochSampler&) { s.use(Precision::bf16()); }},
      {"fp8", "precision", true, [](Session& s, SmallModel&, EpochSampler&) { s.use(Precision::fp8()); }},
      {"fp16", "precision", true,
       [](Session& s, SmallModel&, EpochSampler&) {
         LossScaleRule rule;
         rule.initial = 1024;
         rule.growth_interval = 3;
         s.use(Precision::fp16(rule));
       }},
      {"layer drop", "layer drop", false,
       [](Session& s, SmallModel& m, EpochSampler&) { s.use(m->layer_drop); }, true},
      {"layer drop by sample", "layer drop", false,
       [](Session& s, SmallModel& m, EpochSampler&) {
         s.use(LayerDrop(m->stack, early_drops().per_sample(true)));
       }},
      {"recompute", "recompute", false,
       [](Session& s, SmallModel& m, EpochSampler&) { s.use(Recompute(m->stack)); }},
      // No hook, but another model.
      {"fused layers", "layers", false, [](Session&, SmallModel&, EpochSampler&) {}, false, true},
      {"curriculum", "curriculum", false,
       [lengths](Session& s, SmallModel&, EpochSampler&) { s.use(lengths(LengthMode::truncate)); }},
      {"curriculum by reshape", "curriculum", false,
       [lengths](Session& s, SmallModel&, EpochSampler&) { s.use(lengths(LengthMode::reshape)); }},
      {"curriculum by window", "window", false,
       [](Session& s, SmallModel& m, EpochSampler&) {
         m->uses_window = true;
         s.use(WindowLength(m->window, LengthSchedule(2, kFullLength).ramp_steps(6).difficulty_step(2)));
       }},
      {"learning rate", "learning rate", false,
       [](Session& s, SmallModel&, EpochSampler&) {
         s.use(LearningRate(warmup_cosine({3, 20})));
       }},
      // A number of the optimizer's, and one of the model's, which no checkpoint holds.
      {"vary", "vary", false,
       [](Session& s, SmallModel& m, EpochSampler&) {
         s.use(Vary(VaryOptions("weight_decay").at_one(0.3).at_zero(0.05), warmup_cosine({3, 12})));
         s.use(Vary(VaryOptions("logit_scale").at_one(1).at_zero(0.5), warmup_linear({0, 8}),
                    [model = m.ptr()](double scale) { model->logit_scale = scale; }));
       }},
      {"sampler", "sampler", false, [](Session& s, SmallModel&, EpochSampler& e) { s.use(e); }},
      {"length buckets", "sampler", false, [](Session& s, SmallModel&, EpochSampler& e) { s.use(e); }, false,
       false, nullptr,
       [](const Communicator& world) {
         const std::vector<int64_t> lengths{7, 8, 7, 8, 8, 7, 7, 8, 7};
         const auto options = LengthBucketsOptions(16 * world.world_size()).bounds({7, 8}).seed(3);
         return LengthBuckets(lengths, options, world);
       }},
      // What decides by the value is used with it. The loss falls, so the best is that of the first step: a
      // state that was lost shows.
      {"validation, early stopping and save best", "validation", false,
       [](Session& s, SmallModel& m, EpochSampler&) {
         static const TemporaryFolder folder;  // with a folder for each run
         static std::atomic<int64_t> runs{0};
         const auto measure = [m]() mutable {
           const auto batch = small_batch(99);
           const at::Device device = m->head->bias.device();
           return m->loss(batch.first.to(device), batch.second.to(device)).item<double>();
         };
         s.use(SaveBest(folder.path(std::to_string(++runs))))
             .use(EarlyStopping(/*patience=*/100))
             .use(Validation(ValidationOptions(1).larger_is_better(true), measure));
       }},
  };
}

// GradientRelease is not among them, because most optimizers here look at all gradients first (finite_check). It goes
// with what neither adds up gradients nor looks at them.
inline bool goes_with_release(const RegisteredHook& hook) {
  return hook.kind != "accumulation" && !hook.has_guard;
}

// Adapters of the stack's layers, over weights in 4 bits, too, of which one stays in 16 for 8-bit products;
// the head's bias is trained beside them, so that there is a vector. No hooks, but other models: not among
// the others, because they are tested with each of those (lora_session.cpp).
inline std::vector<RegisteredHook> adapted_models() {
  const auto adapted = [](bool in_4_bits, bool mixed) {
    return [=](SmallModel& model, double dropout) {
      const at::ScalarType dtype = model->head->bias.scalar_type();
      if (mixed) model->to(at::kBFloat16);
      if (in_4_bits) modules::quantize(*model, modules::Nf4Options().targets({"stack.0", "stack.1"}));
      modules::add_lora(*model, modules::LoraOptions(3).alpha(6).dropout(dropout).targets({"stack.*"}));
      model->head->bias.requires_grad_(true);
      const torch::NoGradGuard no_grad;
      for (const auto& layer : model->blocks) layer->adapter("default")->B.uniform_(-0.2, 0.2);
      if (!mixed) model->to(dtype);
    };
  };
  const auto no_hook = [](Session&, SmallModel&, EpochSampler&) {};
  return {{"adapters", "layers", false, no_hook, false, false, adapted(false, false)},
          {"adapters over 4 bits", "layers", false, no_hook, false, false, adapted(true, false)},
          // fp32 adapters over 16 and 4 bits, as fine-tuning has them
          {"adapters over bf16 and 4 bits", "layers", false, no_hook, false, false, adapted(true, true)}};
}

}  // namespace pacer::testing
