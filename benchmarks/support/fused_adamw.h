// The peer of FusedAdamW: LibTorch's fused AdamW, called as torch.optim.AdamW(fused=True) calls it in Python.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace bench {

struct AdamWSettings {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

struct FusedAdamWState {
  // fp32 or fp64 tensors, or others, that require no gradient.
  explicit FusedAdamWState(std::vector<at::Tensor> of, const AdamWSettings& with = {})
      : settings(with), parameters(std::move(of)) {
    for (const auto& parameter : parameters) {
      exp_avgs.push_back(at::zeros_like(parameter));
      exp_avg_sqs.push_back(at::zeros_like(parameter));
      steps.push_back(at::zeros({}, parameter.options().dtype(at::kFloat)));
    }
  }
  void count() { at::_foreach_add_(steps, 1); }
  void update(const std::vector<at::Tensor>& gradients,
              const std::optional<at::Tensor>& found_inf = std::nullopt) {
    at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, {}, steps, settings.lr, settings.beta1,
                      settings.beta2, settings.weight_decay, settings.eps, /*amsgrad=*/false,
                      /*maximize=*/false, /*grad_scale=*/std::nullopt, found_inf);
  }
  void step(const std::vector<at::Tensor>& gradients,
            const std::optional<at::Tensor>& found_inf = std::nullopt) {
    count();
    update(gradients, found_inf);
  }

  AdamWSettings settings;
  std::vector<at::Tensor> parameters, exp_avgs, exp_avg_sqs, steps;
};

}  // namespace bench
