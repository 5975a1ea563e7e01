#include "contenders.h"

#include <memory>

#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>

namespace bench::kernels {
namespace {

template <class Options>
Options with_settings() {
  return Options(kSettings.lr)
      .betas({kSettings.beta1, kSettings.beta2})
      .eps(kSettings.eps)
      .weight_decay(kSettings.weight_decay);
}

pacer::FusedAdamWOptions pacer_options(Work work) {
  auto options = with_settings<pacer::FusedAdamWOptions>().finite_check(work == Work::fp32_checked);
  switch (work) {
    case Work::bf16_master:
      return options.master_weights(pacer::MasterWeights::fp32);
    case Work::fp32_8bit:
      return options.state_bits(8);
    case Work::bf16_remainder_8bit:
      return options.state_bits(8).master_weights(pacer::MasterWeights::remainder);
    case Work::bf16_24_8bit:
      return options.state_bits(8).master_weights(pacer::MasterWeights::remainder_8);
    case Work::bf16_remainder:
      return options.master_weights(pacer::MasterWeights::remainder);
    case Work::bf16_stochastic:
      return options.master_weights(pacer::MasterWeights::none).rounding(pacer::Rounding::stochastic);
    case Work::bf16:
      return options.master_weights(pacer::MasterWeights::none);
    default:
      return options;
  }
}

// Any torch::optim::Optimizer.
template <class Optimizer, class Options>
Contender make_optimizer(const ModelData& data, const Options& options) {
  std::vector<at::Tensor> parameters = own_parameters(data);
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].set_requires_grad(true);
    parameters[i].mutable_grad() = data.gradients[i];
  }
  auto optimizer = std::make_shared<Optimizer>(parameters, options);
  return {[optimizer] { optimizer->step(); }, parameters};
}

}  // namespace

ModelData make_model_data(const ModelShapes& model, Work work, at::Device device) {
  constexpr double kInitialDeviation = 0.02;
  constexpr double kGradientDeviation = 0.1;
  const at::NoGradGuard no_grad;
  torch::manual_seed(1);
  const auto options = at::TensorOptions().dtype(facts_of(work).type).device(device);
  ModelData data;
  for (const auto& shape : model.shapes) {
    data.initial.push_back(at::empty(shape, options).normal_(0, kInitialDeviation));
    data.gradients.push_back(at::empty(shape, options).normal_(0, kGradientDeviation));
  }
  return data;
}

std::vector<ContenderPlan> contender_plans(Work work, Device device) {
  // In fp32, LibTorch adds squares one by one on a CPU and loses digits.
  constexpr double kOfSinglePrecisionNorms = 1e-2;
  const double tolerance = facts_of(work).tolerance;
  if (work == Work::norm) {
    return {
        {"pacer norm", "pacer::kernels::sum_of_squares and finish_check: norm and finite flag in one read",
         tolerance, device == Device::cpu ? make_norm_on_cpu : make_norm_on_cuda},
        {"_foreach_norm", "at::_foreach_norm, at::stack, at::linalg_vector_norm", kOfSinglePrecisionNorms,
         make_foreach_norm}};
  }
  if (work == Work::lamb) {
    // The first peer is what results are compared with, so it adds its norms in double.
    return {{"pacer", "pacer::FusedLamb::step()", tolerance,
             [](const ModelData& data) {
               return make_optimizer<pacer::FusedLamb>(data, with_settings<pacer::FusedLambOptions>());
             }},
            {"loop", "LAMB in sixteen at:: operators on one tensor after the other, norms in double",
             tolerance, make_lamb_loop},
            {"_foreach_",
             "LAMB in a chain of at::_foreach_ operators, norms in fp32, trust ratios left on the device",
             kOfSinglePrecisionNorms, make_lamb_foreach}};
  }
  if (work == Work::sgd) {
    const auto options =
        torch::optim::SGDOptions(kSettings.lr).momentum(kSgdMomentum).weight_decay(kSettings.weight_decay);
    return {{"pacer", "pacer::FusedSgd::step()", tolerance,
             [options](const ModelData& data) {
               return make_optimizer<pacer::FusedSgd>(data, pacer::FusedSgdOptions(options));
             }},
            {"_fused_sgd_", "at::_fused_sgd_: what fused=True does in Python", tolerance, make_fused_sgd},
            {"torch::optim", "torch::optim::SGD::step() of C++", tolerance,
             [options](const ModelData& data) { return make_optimizer<torch::optim::SGD>(data, options); }}};
  }
  if (work == Work::rmsprop) {
    const auto options = torch::optim::RMSpropOptions(kSettings.lr)
                             .weight_decay(kSettings.weight_decay)
                             .momentum(kSgdMomentum);
    return {
        {"pacer", "pacer::FusedRmsprop::step()", tolerance,
         [options](const ModelData& data) {
           return make_optimizer<pacer::FusedRmsprop>(data, pacer::FusedRmspropOptions(options));
         }},
        {"torch::optim", "torch::optim::RMSprop::step() of C++", tolerance,
         [options](const ModelData& data) { return make_optimizer<torch::optim::RMSprop>(data, options); }}};
  }
  std::vector<ContenderPlan> plans;
  const auto add = [&](const char* name, const char* meaning,
                       std::function<Contender(const ModelData&)> make) {
    plans.push_back({name, meaning, tolerance, std::move(make)});
  };
  add("pacer", "pacer::FusedAdamW::step()",
      [work](const ModelData& data) { return make_optimizer<pacer::FusedAdamW>(data, pacer_options(work)); });
  switch (work) {
    case Work::fp32_checked:
      add("amp+fused",
          "at::_amp_foreach_non_finite_check_and_unscale_ with scale 1, at::_foreach_add_, at::_fused_adamw_ "
          "with found_inf, at::_foreach_sub_: what GradScaler and fused=True do in Python",
          make_checked_fused);
      break;
    case Work::bf16_master:
    case Work::bf16_remainder:
    case Work::bf16_remainder_8bit:
    case Work::bf16_24_8bit:
    case Work::bf16_stochastic:
      add("upcast+fused+copy",
          "at::_foreach_copy_ of the bf16 gradients to fp32, at::_foreach_add_, at::_fused_adamw_ on fp32 "
          "masters, at::_foreach_copy_ to the bf16 parameters",
          [](const ModelData& data) { return make_fused_master(data, true); });
      add("fused+copy", "the same with gradients that are fp32 already, twice the bytes of bf16 ones",
          [](const ModelData& data) { return make_fused_master(data, false); });
      break;
    default:
      if (work != Work::fp64) {
        add("_fused_adamw_",
            "at::_foreach_add_ on the step counts, at::_fused_adamw_: what fused=True does in Python",
            make_fused);
        if (device == Device::cuda) {
          add("_foreach_", "a chain of eight at::_foreach_ operators: what foreach=True does in Python",
              make_foreach);
        }
      }
      add("torch::optim", "torch::optim::AdamW::step() of C++", [](const ModelData& data) {
        return make_optimizer<torch::optim::AdamW>(data, with_settings<torch::optim::AdamWOptions>());
      });
  }
  return plans;
}

Reference exact_reference(Work work, const ModelData& data) {
  if (work != Work::norm) return {{}, data.initial};
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros({}, data.gradients.front().options().dtype(at::kDouble));
  for (const auto& gradient : data.gradients)
    sum += at::linalg_vector_norm(gradient.to(at::kDouble)).square_();
  return {{at::sqrt(sum)}, {}};
}

void require_agreement(const ContenderPlan& plan, const Contender& contender, const Reference& reference) {
  const at::NoGradGuard no_grad;
  const auto& expected = reference.results;
  pacer::require<pacer::Error>(contender.results.size() == expected.size(), plan.name, " has ",
                               contender.results.size(), " results instead of ", expected.size());
  // Summed on the device, read once.
  at::Tensor difference = at::zeros({}, expected.front().options().dtype(at::kDouble));
  at::Tensor change = at::zeros_like(difference);
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += at::sub(contender.results[i].detach(), expected[i].detach()).square_().sum(at::kDouble);
    at::Tensor moved = expected[i].detach().clone();
    if (!reference.start.empty()) moved.sub_(reference.start[i]);
    change += moved.square_().sum(at::kDouble);
  }
  const double error = at::sqrt(difference / change).item<double>();
  pacer::require<pacer::Error>(error <= plan.tolerance, plan.name,
                               " computes something else (relative error ", error, ", tolerated ",
                               plan.tolerance, "), so it was not timed");
}

}  // namespace bench::kernels
