#include "textbook_adam.h"

#include <cmath>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

namespace scales {

TextbookOneBitAdam::TextbookOneBitAdam(const Tensors& parameters, const pacer::OneBitAdamOptions& options,
                                       const std::shared_ptr<pacer::Communicator>& world, ScaleUnit unit)
    : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                std::make_unique<pacer::OneBitAdamOptions>(options)),
      mean_(parameters, world, unit) {}

const pacer::OneBitAdamOptions& TextbookOneBitAdam::options() const {
  return static_cast<const pacer::OneBitAdamOptions&>(param_groups().front().options());
}

at::Tensor TextbookOneBitAdam::step(LossClosure closure) {
  auto loss = closure == nullptr ? at::Tensor() : closure();
  const at::NoGradGuard no_grad;
  const auto [beta1, beta2] = options().betas();
  const double c1 = correction(beta1, ++steps_);
  auto gradient = gradients_of(parameters_of(*this));
  if (!momentum_.defined()) momentum_ = at::zeros_like(gradient), variance_ = at::zeros_like(gradient);
  if (!denominator_.defined()) {
    gradient = mean_.in_full_precision(gradient);
    momentum_ = beta1 * momentum_ + (1 - beta1) * gradient;
    variance_ = beta2 * variance_ + (1 - beta2) * gradient.square();
    const double c2 = correction(beta2, steps_);
    move_parameters(momentum_ / c1 / (variance_.sqrt() / std::sqrt(c2) + options().eps()));
    if (steps_ == options().freeze_step()) freeze();
  } else {
    momentum_ = mean_.as_signs(beta1 * momentum_ + (1 - beta1) * gradient);
    move_parameters(momentum_ / c1 / denominator_);
  }
  return loss;
}

void TextbookOneBitAdam::freeze() {
  const auto corrected = variance_ / correction(std::get<1>(options().betas()), steps_);
  const auto guarded = raise_to_floor(corrected, parameters_of(*this), options().variance_floor());
  denominator_ = guarded.sqrt() + options().eps();
}

void TextbookOneBitAdam::move_parameters(const at::Tensor& update) {
  const auto parameters = parameters_of(*this);
  const auto updates = views_of(update, parameters);
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mul_(1 - options().lr() * options().weight_decay()).sub_(updates[i], options().lr());
  }
}

}  // namespace scales
