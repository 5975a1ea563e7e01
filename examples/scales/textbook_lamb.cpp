#include "textbook_lamb.h"

#include <algorithm>
#include <cmath>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

namespace scales {
namespace {

double norm_of(const at::Tensor& values) { return values.norm().item<double>(); }
double rms_of(const at::Tensor& values) {
  return norm_of(values) / std::sqrt(static_cast<double>(values.numel()));
}

}  // namespace

TextbookOneBitLamb::TextbookOneBitLamb(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                       const pacer::OneBitLambOptions& defaults,
                                       const std::shared_ptr<pacer::Communicator>& world, ScaleUnit unit)
    : Optimizer(groups, std::make_unique<pacer::OneBitLambOptions>(defaults)),
      parameters_of_all_(parameters_of(*this)),
      rule_(defaults),
      mean_(parameters_of_all_, world, unit) {
  // From LibTorch 2.12 on the base class drops options of this type.
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].has_options()) param_groups()[g].set_options(groups[g].options().clone());
  }
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const pacer::OneBitLambOptions&>(group.options());
    tensors_.resize(tensors_.size() + group.params().size(), Tensor{&options});
  }
}

at::Tensor TextbookOneBitLamb::step(LossClosure closure) {
  auto loss = closure == nullptr ? at::Tensor() : closure();
  const at::NoGradGuard no_grad;
  const auto gradient = gradients_of(parameters_of_all_);
  ++steps_;
  if (!momentum_.defined()) momentum_ = at::zeros_like(gradient), variance_ = at::zeros_like(gradient);
  if (denominator_.defined()) {
    compressed_step(gradient);
  } else {
    warm_up_step(mean_.in_full_precision(gradient));
    if (steps_ == rule_.freeze_step()) freeze();
  }
  return loss;
}

void TextbookOneBitLamb::warm_up_step(const at::Tensor& gradient) {
  const auto [beta1, beta2] = rule_.betas();
  momentum_ = beta1 * momentum_ + (1 - beta1) * gradient;
  variance_ = beta2 * variance_ + (1 - beta2) * gradient.square();
  const auto root = variance_.sqrt() / std::sqrt(correction(beta2, steps_));
  const auto updates =
      views_of(momentum_ / correction(beta1, steps_) / (root + rule_.eps()), parameters_of_all_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& parameter = parameters_of_all_[i];
    Tensor& own = tensors_[i];
    const auto update = updates[i] + own.options->weight_decay() * parameter;
    const double size = norm_of(parameter), change = norm_of(update);
    double ratio = 1;
    if (own.options->adapt() && size > 0 && change > 0) {
      ratio = std::clamp(size / change, own.options->min_coeff(), own.options->max_coeff());
      const double kept = own.options->coeff_beta();
      own.coefficient = kept * own.coefficient + (1 - kept) * ratio;
      ++own.ratios;
    }
    parameter.sub_(update, own.options->lr() * ratio);
  }
}

// From here on a tensor's coefficient stands, and its momentum travels as large as that of the mean tensor.
void TextbookOneBitLamb::freeze() {
  const double c2 = correction(std::get<1>(rule_.betas()), steps_);
  const auto guarded = raise_to_floor(variance_ / c2, parameters_of_all_, rule_.variance_floor());
  denominator_ = guarded.sqrt() + rule_.eps();
  fresh_variance_ = guarded * c2;
  const auto momenta = views_of(momentum_, parameters_of_all_);
  double mean = 0;
  for (const at::Tensor& momentum : momenta) mean += rms_of(momentum) / static_cast<double>(momenta.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    Tensor& own = tensors_[i];
    own.coefficient =
        own.ratios > 0 ? own.coefficient / correction(own.options->coeff_beta(), own.ratios) : 1;
    const double size = rms_of(momenta[i]);
    own.scale = size > 0 ? std::clamp(mean / size, std::ldexp(1.0, -10), std::ldexp(1.0, 10)) : 1;
  }
}

void TextbookOneBitLamb::compressed_step(const at::Tensor& gradient) {
  const auto [beta1, beta2] = rule_.betas();
  auto agreed = beta1 * momentum_ + (1 - beta1) * gradient;
  auto views = views_of(agreed, parameters_of_all_);
  for (size_t i = 0; i < views.size(); ++i) views[i].mul_(tensors_[i].scale);
  agreed = mean_.as_signs(agreed);
  views = views_of(agreed, parameters_of_all_);
  for (size_t i = 0; i < views.size(); ++i) views[i].div_(tensors_[i].scale);

  const auto seen = (agreed - beta1 * momentum_) / (1 - beta1);  // the gradient that would lead there
  fresh_variance_ = beta2 * fresh_variance_ + (1 - beta2) * seen.square();
  momentum_ = agreed;
  const auto fresh_root = (fresh_variance_ / correction(beta2, steps_)).sqrt() + rule_.eps();
  const auto ratios = views_of(denominator_ / fresh_root, parameters_of_all_);
  const auto updates = views_of(momentum_ / correction(beta1, steps_) / denominator_, parameters_of_all_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& parameter = parameters_of_all_[i];
    Tensor& own = tensors_[i];
    const auto update = updates[i] + own.options->weight_decay() * parameter;
    if (own.options->adapt()) {
      double factor = ratios[i].max().item<double>();
      const double whole = norm_of(update);
      const double share =
          own.options->weight_decay() > 0 && whole > 0 ? std::min(1.0, norm_of(updates[i]) / whole) : 1;
      factor = std::clamp(factor * share + (1 - share), own.options->factor_min(), own.options->factor_max());
      const double most = own.options->factor_threshold();
      own.factor = std::clamp(factor, (1 - most) * own.factor, (1 + most) * own.factor);
    }
    parameter.sub_(update, own.options->lr() * own.coefficient * own.factor);
  }
}

}  // namespace scales
