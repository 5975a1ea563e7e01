#include "operator_steps.h"

#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace bench::kernels {
namespace {

using TensorList = std::vector<at::Tensor>;

TensorList zeros_like_all(const TensorList& tensors) {
  TensorList zeros;
  for (const auto& tensor : tensors) zeros.push_back(at::zeros_like(tensor));
  return zeros;
}

TensorList to_fp32(const TensorList& tensors) {
  TensorList converted;
  for (const auto& tensor : tensors)
    converted.push_back(tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  return converted;
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
  struct State {
    TensorList parameters, exp_avgs, exp_avg_sqs;
    int64_t steps = 0;
  };
  auto state = std::make_shared<State>();
  state->parameters = own_parameters(data);
  state->exp_avgs = zeros_like_all(state->parameters);
  state->exp_avg_sqs = zeros_like_all(state->parameters);
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            const double t = static_cast<double>(++state->steps);
            const double correction1 = 1 - std::pow(kSettings.beta1, t);
            const double correction2_sqrt = std::sqrt(1 - std::pow(kSettings.beta2, t));
            at::_foreach_mul_(state->parameters, 1 - kSettings.lr * kSettings.weight_decay);
            at::_foreach_lerp_(state->exp_avgs, gradients, 1 - kSettings.beta1);
            at::_foreach_mul_(state->exp_avg_sqs, kSettings.beta2);
            at::_foreach_addcmul_(state->exp_avg_sqs, gradients, gradients, 1 - kSettings.beta2);
            TensorList denominators = at::_foreach_sqrt(state->exp_avg_sqs);
            at::_foreach_div_(denominators, correction2_sqrt);
            at::_foreach_add_(denominators, kSettings.eps);
            at::_foreach_addcdiv_(state->parameters, state->exp_avgs, denominators,
                                  -kSettings.lr / correction1);
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
