// One optimizer over a few parameters of some dtype and memory order, stepped beside the fp64 restatement
// that it must be equal to.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_adam.h>

#include "support/heard_warnings.h"
#include "support/optimizers/lifecycle_reference.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/session/registry.h"

namespace pacer::testing {

enum class Layout { row_major, channels_last, transposed, gaps };
inline const std::vector<Layout> kAllLayouts = {Layout::row_major, Layout::channels_last, Layout::transposed,
                                                Layout::gaps};

// A leaf of that layout with the values of a row-major tensor.
inline Tensor in_layout(const Tensor& values, Layout layout) {
  Tensor tensor = values.clone();
  if (layout == Layout::channels_last && values.dim() == 4)
    tensor = values.contiguous(at::MemoryFormat::ChannelsLast);
  if (layout == Layout::transposed && values.dim() >= 2) {
    tensor = values.transpose(0, 1).contiguous().transpose(0, 1);
  }
  if (layout == Layout::gaps && values.dim() >= 1) {
    std::vector<int64_t> sizes = values.sizes().vec();
    sizes.back() *= 2;
    tensor = torch::zeros(sizes, values.options()).slice(-1, 0, sizes.back(), 2).copy_(values);
  }
  return tensor.detach().requires_grad_();
}

inline Doubles doubles_of(const Tensor& tensor) {
  const Tensor flat = tensor.detach().cpu().to(at::kDouble).contiguous().view({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

// Of what Muon takes for a matrix.
inline size_t rows_of(const Tensor& parameter) {
  return parameter.dim() >= 2 ? static_cast<size_t>(parameter.size(0)) : 1;
}

// One optimizer over a few parameters, and what it must be equal to.
class Lifecycle {
 public:
  Lifecycle(RegisteredOptimizer entry, at::ScalarType dtype, Layout layout, at::Device device)
      : entry_(std::move(entry)), dtype_(dtype), layout_(layout), device_(device) {
    Samples samples(3);
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
        {"convolution", {4, 3, 2, 2}}, {"matrix", {6, 5}}, {"bias", {7}}};
    for (const auto& [name, shape] : shapes) named_.insert(name, make(shape, samples));
    optimizer = entry_.make(named_, Communicator::alone(device));
    own = dynamic_cast<SessionOptimizer*>(optimizer.get());
    own->name_parameters(named_);
    const NamedTensors state = own->export_state();
    const bool is_l2 = dynamic_cast<FusedAdam*>(optimizer.get()) != nullptr;
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      for (const Tensor& parameter : optimizer->param_groups()[g].params()) {
        parameters.push_back(parameter);
        reference.parameters.emplace_back(LifecycleOptions(state, g, is_l2), g, doubles_of(parameter));
        reference.parameters.back().options.travels_alone = entry_.in_buckets;
        reference.parameters.back().options.is_lion = entry_.name == "Lion";
        reference.parameters.back().rows = rows_of(parameter);
      }
    }
  }

  Tensor make(const std::vector<int64_t>& shape, Samples& samples) const {
    Tensor values = torch::empty(shape, at::kDouble);
    for (int64_t k = 0; k < values.numel(); ++k) values.view({-1})[k] = samples.uniform() - 0.5;
    return in_layout(values.to(dtype_).to(device_), layout_);
  }

  // With gradients for the parameters that are trained.
  void step(int steps = 1) {
    for (int i = 0; i < steps; ++i, ++taken_) {
      std::vector<std::optional<Doubles>> gradients(parameters.size());
      for (size_t j = 0; j < parameters.size(); ++j) {
        Tensor& p = parameters[j];
        p.mutable_grad() = Tensor();
        if (!p.requires_grad()) continue;
        const Tensor gradient =
            onebit_gradient(torch::empty(p.sizes(), at::kFloat), 0, static_cast<uint64_t>(taken_), j);
        p.mutable_grad() = gradient.to(p.scalar_type()).to(device_);
        gradients[j] = doubles_of(p.grad());
      }
      const HeardQuietly quiet;
      optimizer->step();
      reference.step(gradients);
    }
  }

  bool is_onebit() const { return reference.parameters.front().options.freeze_step > 0; }

  // By how many learning rates the parameters are further from the reference than their dtype explains.
  double apart() const {
    double worst = 0;
    for (size_t j = 0; j < parameters.size(); ++j) {
      const Doubles values = doubles_of(parameters[j]);
      const LifecycleParameter& expected = reference.parameters[j];
      for (size_t k = 0; k < values.size(); ++k) {
        const double off =
            std::abs(values[k] - expected.p[k]) - unit(parameters[j]) * (1 + std::abs(expected.p[k]));
        worst = std::isfinite(values[k]) ? std::max(worst, off / expected.options.lr) : HUGE_VAL;
      }
    }
    return worst;
  }

  // Values, gradients and state tensors, to the bit.
  std::vector<Tensor> everything() const {
    std::vector<Tensor> all;
    for (const Tensor& p : parameters) {
      all.push_back(copy_of(p));
      const auto found = optimizer->state().find(p.unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      const auto& state = static_cast<const FusedAdamStateFields&>(*found->second);
      for (const Tensor& tensor :
           {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.master(), state.remainder(),
            state.trust_average(), state.row_moment(), state.exp_avg_scale(), state.exp_avg_sq_scale()}) {
        all.push_back(copy_of(tensor));
      }
      all.push_back(torch::tensor(state.step()));
      all.push_back(torch::tensor({state.average().weight_sum, state.average().lr_max}, at::kDouble));
    }
    return all;
  }

  // A new optimizer over the same parameters.
  std::unique_ptr<torch::optim::Optimizer> another() const {
    auto made = entry_.make(named_, Communicator::alone(device_));
    dynamic_cast<SessionOptimizer&>(*made).name_parameters(named_);
    return made;
  }
  void take(std::unique_ptr<torch::optim::Optimizer> other) {
    optimizer = std::move(other);
    own = dynamic_cast<SessionOptimizer*>(optimizer.get());
  }
  const NamedParameters& named() const { return named_; }
  const RegisteredOptimizer& entry() const { return entry_; }
  Layout layout() const { return layout_; }
  void coarsen(double unit) { coarsest_ = std::max(coarsest_, unit); }

  std::unique_ptr<torch::optim::Optimizer> optimizer;
  SessionOptimizer* own = nullptr;
  std::vector<Tensor> parameters;  // in the optimizer's order
  LifecycleReference reference;

 private:
  struct HeardQuietly {
    HeardQuietly() : ear(said), guard(&ear) {}
    std::string said;
    HeardWarnings ear;
    const c10::WarningUtils::WarningHandlerGuard guard;
  };

  // What one value of that dtype may be off after some steps and an edit that rounded it.
  double unit(const Tensor& p) const {
    const bool has_no_master = entry_.name.find("nearest") != std::string::npos ||
                               entry_.name.find("stochastic") != std::string::npos;
    // Of 1/254 of a group's largest moment, which for a small element beside large ones is much of an update.
    if (entry_.name.find("8 bits") != std::string::npos) return 0.004;
    if (has_no_master && p.scalar_type() == at::kBFloat16) return 0.05;  // 16 digits only, moments as well
    const double own = p.scalar_type() == at::kDouble  ? 1e-12
                       : p.scalar_type() == at::kFloat ? 2e-6
                       : p.scalar_type() == at::kHalf  ? 1e-3
                                                       : 6e-3;
    return std::max(own, coarsest_);
  }

  RegisteredOptimizer entry_;
  at::ScalarType dtype_;
  Layout layout_;
  at::Device device_;
  NamedParameters named_;
  int64_t taken_ = 0;
  double coarsest_ = 0;
};

}  // namespace pacer::testing
