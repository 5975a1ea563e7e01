#include "contenders.h"

#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace bench::kernels {
namespace {

using TensorList = std::vector<at::Tensor>;

TensorList to_fp32(const TensorList& tensors) {
  TensorList converted;
  for (const auto& tensor : tensors)
    converted.push_back(tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  return converted;
}

// What both rules have, with a count of steps on the host.
struct Moments {
  explicit Moments(const ModelData& data) : parameters(own_parameters(data)) {
    for (const auto& parameter : parameters) {
      exp_avgs.push_back(at::zeros_like(parameter));
      exp_avg_sqs.push_back(at::zeros_like(parameter));
    }
  }
  // Counts a step; its two corrections.
  std::pair<double, double> next_corrections() {
    const auto t = static_cast<double>(++steps);
    return {1 - std::pow(kSettings.beta1, t), 1 - std::pow(kSettings.beta2, t)};
  }
  // Takes in gradients; the denominators of their step, whose correction of exp_avg_sqs is `c2`.
  TensorList take_in(const TensorList& gradients, double c2) {
    at::_foreach_lerp_(exp_avgs, gradients, 1 - kSettings.beta1);
    at::_foreach_mul_(exp_avg_sqs, kSettings.beta2);
    at::_foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - kSettings.beta2);
    TensorList denominators = at::_foreach_sqrt(exp_avg_sqs);
    at::_foreach_div_(denominators, std::sqrt(c2));
    at::_foreach_add_(denominators, kSettings.eps);
    return denominators;
  }

  TensorList parameters, exp_avgs, exp_avg_sqs;
  int64_t steps = 0;
};

// FusedLambOptions' defaults.
constexpr double kMinCoeff = 0.01, kMaxCoeff = 10;

// 1 where a norm is zero. Of any number of norms at once.
at::Tensor trust_ratios(const at::Tensor& of_parameters, const at::Tensor& of_updates) {
  const at::Tensor ratios = at::div(of_parameters, of_updates).clamp_(kMinCoeff, kMaxCoeff);
  const at::Tensor counts = at::logical_and(of_parameters.gt(0), of_updates.gt(0));
  return at::where(counts, ratios, at::ones_like(ratios));
}

}  // namespace

TensorList own_parameters(const ModelData& data) {
  const at::NoGradGuard no_grad;
  TensorList parameters;
  for (const auto& tensor : data.initial) parameters.push_back(tensor.clone());
  return parameters;
}

Contender make_fused(const ModelData& data) {
  auto state = std::make_shared<FusedAdamWState>(own_parameters(data));
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            state->step(gradients);
          },
          state->parameters};
}

Contender make_checked_fused(const ModelData& data) {
  auto state = std::make_shared<FusedAdamWState>(own_parameters(data));
  const auto scalar = data.initial.front().options().dtype(at::kFloat);
  return {[state, gradients = data.gradients, found_inf = at::zeros({}, scalar),
           inverse_scale = at::ones({}, scalar)]() mutable {
            const at::NoGradGuard no_grad;
            found_inf.zero_();
            at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale);
            state->step(gradients, found_inf);
            at::_foreach_sub_(state->steps, TensorList(state->steps.size(), found_inf));
          },
          state->parameters};
}

Contender make_fused_master(const ModelData& data, bool upcast) {
  auto state = std::make_shared<FusedAdamWState>(to_fp32(data.initial));
  const TensorList parameters = own_parameters(data);
  return {[state, parameters, upcast, gradients = data.gradients, wide_gradients = to_fp32(data.gradients)] {
            const at::NoGradGuard no_grad;
            if (upcast) at::_foreach_copy_(wide_gradients, gradients);
            state->step(wide_gradients);
            at::_foreach_copy_(parameters, state->parameters);
          },
          parameters};
}

Contender make_foreach(const ModelData& data) {
  auto state = std::make_shared<Moments>(data);
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            const auto [c1, c2] = state->next_corrections();
            at::_foreach_mul_(state->parameters, 1 - kSettings.lr * kSettings.weight_decay);
            const TensorList denominators = state->take_in(gradients, c2);
            at::_foreach_addcdiv_(state->parameters, state->exp_avgs, denominators, -kSettings.lr / c1);
          },
          state->parameters};
}

Contender make_fused_sgd(const ModelData& data) {
  const TensorList parameters = own_parameters(data);
  TensorList buffers;
  for (const auto& parameter : parameters) buffers.push_back(at::zeros_like(parameter));
  return {[parameters, buffers, gradients = data.gradients, is_first = true]() mutable {
            const at::NoGradGuard no_grad;
            at::_fused_sgd_(parameters, gradients, buffers, kSettings.weight_decay, kSgdMomentum,
                            kSettings.lr,
                            /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false, is_first);
            is_first = false;
          },
          parameters};
}

Contender make_lamb_loop(const ModelData& data) {
  auto state = std::make_shared<Moments>(data);
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            const auto [c1, c2] = state->next_corrections();
            for (size_t i = 0; i < gradients.size(); ++i) {
              at::Tensor& parameter = state->parameters[i];
              at::Tensor& exp_avg = state->exp_avgs[i];
              at::Tensor& exp_avg_sq = state->exp_avg_sqs[i];
              exp_avg.lerp_(gradients[i], 1 - kSettings.beta1);
              exp_avg_sq.mul_(kSettings.beta2).addcmul_(gradients[i], gradients[i], 1 - kSettings.beta2);
              const at::Tensor denominator = exp_avg_sq.sqrt().div_(std::sqrt(c2)).add_(kSettings.eps);
              const at::Tensor update =
                  at::div(exp_avg, denominator).div_(c1).add_(parameter, kSettings.weight_decay);
              const at::Tensor ratio =
                  trust_ratios(at::linalg_vector_norm(parameter, 2, {}, false, at::kDouble),
                               at::linalg_vector_norm(update, 2, {}, false, at::kDouble));
              parameter.sub_(at::mul(update, ratio.to(at::kFloat)), kSettings.lr);
            }
          },
          state->parameters};
}

Contender make_lamb_foreach(const ModelData& data) {
  auto state = std::make_shared<Moments>(data);
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            const auto [c1, c2] = state->next_corrections();
            TensorList updates = state->take_in(gradients, c2);
            at::_foreach_reciprocal_(updates);
            at::_foreach_mul_(updates, state->exp_avgs);
            at::_foreach_div_(updates, c1);
            at::_foreach_add_(updates, state->parameters, kSettings.weight_decay);
            const at::Tensor ratios = trust_ratios(at::stack(at::_foreach_norm(state->parameters)),
                                                   at::stack(at::_foreach_norm(updates)));
            at::_foreach_mul_(updates, ratios.unbind());
            at::_foreach_add_(state->parameters, updates, -kSettings.lr);
          },
          state->parameters};
}

Contender make_foreach_norm(const ModelData& data) {
  at::Tensor norm = at::zeros({}, data.gradients.front().options());
  return {[norm, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            norm.copy_(at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients))));
          },
          {norm}};
}

}  // namespace bench::kernels
