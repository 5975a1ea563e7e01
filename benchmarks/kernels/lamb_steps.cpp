// The peers of FusedLamb.
#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "operator_steps.h"

namespace bench::kernels {
namespace {

using TensorList = std::vector<at::Tensor>;

// FusedLambOptions' defaults.
constexpr double kMinCoeff = 0.01, kMaxCoeff = 10;

struct LambState {
  explicit LambState(const ModelData& data) : parameters(own_parameters(data)) {
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

  TensorList parameters, exp_avgs, exp_avg_sqs;
  int64_t steps = 0;
};

// 1 where a norm is zero. Of any number of norms at once.
at::Tensor trust_ratios(const at::Tensor& of_parameters, const at::Tensor& of_updates) {
  const at::Tensor ratios = at::div(of_parameters, of_updates).clamp_(kMinCoeff, kMaxCoeff);
  const at::Tensor counts = at::logical_and(of_parameters.gt(0), of_updates.gt(0));
  return at::where(counts, ratios, at::ones_like(ratios));
}

}  // namespace

Contender make_lamb_loop(const ModelData& data) {
  auto state = std::make_shared<LambState>(data);
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
  auto state = std::make_shared<LambState>(data);
  return {[state, gradients = data.gradients] {
            const at::NoGradGuard no_grad;
            const auto [c1, c2] = state->next_corrections();
            at::_foreach_lerp_(state->exp_avgs, gradients, 1 - kSettings.beta1);
            at::_foreach_mul_(state->exp_avg_sqs, kSettings.beta2);
            at::_foreach_addcmul_(state->exp_avg_sqs, gradients, gradients, 1 - kSettings.beta2);
            TensorList updates = at::_foreach_sqrt(state->exp_avg_sqs);
            at::_foreach_div_(updates, std::sqrt(c2));
            at::_foreach_add_(updates, kSettings.eps);
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

}  // namespace bench::kernels
