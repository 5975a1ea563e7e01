#include "contenders.h"

#include <memory>

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>

#include "operator_steps.h"

namespace bench::kernels {
namespace {

bool is_bf16(Work work) {
  return work == Work::bf16_master || work == Work::bf16_remainder || work == Work::bf16_stochastic ||
         work == Work::bf16;
}

at::ScalarType parameter_type(Work work) {
  if (work == Work::fp64) return at::kDouble;
  return is_bf16(work) ? at::kBFloat16 : at::kFloat;
}

double tolerance_of(Work work) {
  switch (work) {
    case Work::fp32:
    case Work::fp32_checked:
    case Work::norm:
    case Work::lamb:
      return 1e-5;
    case Work::fp64:
      return 1e-11;
    // Rounding to bf16 differs where two results straddle the middle between two bf16 numbers.
    case Work::bf16_master:
    case Work::bf16_remainder:
      return 1e-2;
    case Work::bf16_stochastic:
      return 5e-2;  // the reference rounds to nearest
    case Work::bf16:
      return 5e-2;
  }
  return 0;
}

pacer::FusedAdamWOptions pacer_options(Work work) {
  auto options = pacer::FusedAdamWOptions(kSettings.lr)
                     .betas({kSettings.beta1, kSettings.beta2})
                     .eps(kSettings.eps)
                     .weight_decay(kSettings.weight_decay)
                     .finite_check(work == Work::fp32_checked);
  switch (work) {
    case Work::bf16_master:
      return options.master_weights(pacer::MasterWeights::fp32);
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

ContenderPlan pacer_plan(Work work, Device device) {
  if (work == Work::norm) {
    return {"pacer norm", "pacer::kernels::sum_of_squares and finish_check: norm and finite flag in one read",
            1e-6, device == Device::cpu ? make_norm_on_cpu : make_norm_on_cuda};
  }
  if (work == Work::lamb) {
    return {"pacer", "pacer::FusedLamb::step()", tolerance_of(work), [](const ModelData& data) {
              return make_optimizer<pacer::FusedLamb>(data, pacer::FusedLambOptions(kSettings.lr)
                                                                .betas({kSettings.beta1, kSettings.beta2})
                                                                .eps(kSettings.eps)
                                                                .weight_decay(kSettings.weight_decay));
            }};
  }
  return {"pacer", "pacer::FusedAdamW::step()", tolerance_of(work), [work](const ModelData& data) {
            return make_optimizer<pacer::FusedAdamW>(data, pacer_options(work));
          }};
}

ContenderPlan torch_optim_plan(Work work) {
  return {"torch::optim", "torch::optim::AdamW::step() of C++", tolerance_of(work),
          [](const ModelData& data) {
            return make_optimizer<torch::optim::AdamW>(data, torch::optim::AdamWOptions(kSettings.lr)
                                                                 .betas({kSettings.beta1, kSettings.beta2})
                                                                 .eps(kSettings.eps)
                                                                 .weight_decay(kSettings.weight_decay));
          }};
}

ContenderPlan fused_plan(Work work) {
  return {"_fused_adamw_",
          "at::_foreach_add_ on the step counts, at::_fused_adamw_: what fused=True does in Python",
          tolerance_of(work), make_fused};
}

ContenderPlan foreach_plan(Work work) {
  return {"_foreach_", "a chain of eight at::_foreach_ operators: what foreach=True does in Python",
          tolerance_of(work), make_foreach};
}

std::vector<ContenderPlan> lamb_plans(Work work) {
  // The first is what results are compared with, so it adds its norms in double. In fp32, LibTorch adds
  // squares one by one on a CPU and loses digits.
  return {{"loop", "LAMB in sixteen at:: operators on one tensor after the other, norms in double",
           tolerance_of(work), make_lamb_loop},
          {"_foreach_",
           "LAMB in a chain of at::_foreach_ operators, norms in fp32, trust ratios left on the device", 1e-2,
           make_lamb_foreach}};
}

ContenderPlan checked_plan(Work work) {
  return {"amp+fused",
          "at::_amp_foreach_non_finite_check_and_unscale_ with scale 1, at::_foreach_add_, at::_fused_adamw_ "
          "with "
          "found_inf, at::_foreach_sub_: what GradScaler and fused=True do in Python",
          tolerance_of(work), make_checked_fused};
}

std::vector<ContenderPlan> master_plans(Work work) {
  return {{"upcast+fused+copy",
           "at::_foreach_copy_ of the bf16 gradients to fp32, at::_foreach_add_, at::_fused_adamw_ on fp32 "
           "masters, "
           "at::_foreach_copy_ to the bf16 parameters",
           tolerance_of(work), [](const ModelData& data) { return make_fused_master(data, true); }},
          {"fused+copy", "the same with gradients that are fp32 already, twice the bytes of bf16 ones",
           tolerance_of(work), [](const ModelData& data) { return make_fused_master(data, false); }}};
}

// In fp32, LibTorch adds squares one by one on a CPU and loses digits.
ContenderPlan foreach_norm_plan() {
  return {"_foreach_norm", "at::_foreach_norm, at::stack, at::linalg_vector_norm", 1e-2, make_foreach_norm};
}

}  // namespace

ModelData make_model_data(const ModelShapes& model, Work work, at::Device device) {
  constexpr double kInitialDeviation = 0.02;
  constexpr double kGradientDeviation = 0.1;
  const at::NoGradGuard no_grad;
  torch::manual_seed(1);
  const auto options = at::TensorOptions().dtype(parameter_type(work)).device(device);
  ModelData data;
  for (const auto& shape : model.shapes) {
    data.initial.push_back(at::empty(shape, options).normal_(0, kInitialDeviation));
    data.gradients.push_back(at::empty(shape, options).normal_(0, kGradientDeviation));
  }
  return data;
}

std::vector<ContenderPlan> contender_plans(Work work, Device device) {
  std::vector<ContenderPlan> plans = {pacer_plan(work, device)};
  switch (work) {
    case Work::norm:
      plans.push_back(foreach_norm_plan());
      break;
    case Work::fp32_checked:
      plans.push_back(checked_plan(work));
      break;
    case Work::bf16_master:
    case Work::bf16_remainder:
    case Work::bf16_stochastic:
      for (auto& plan : master_plans(work)) plans.push_back(plan);
      break;
    case Work::fp64:
      plans.push_back(torch_optim_plan(work));
      break;
    case Work::lamb:
      for (auto& plan : lamb_plans(work)) plans.push_back(plan);
      break;
    case Work::fp32:
    case Work::bf16:
      plans.push_back(fused_plan(work));
      if (device == Device::cuda) plans.push_back(foreach_plan(work));
      plans.push_back(torch_optim_plan(work));
      break;
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
