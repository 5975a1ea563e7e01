// Mixed precision: forward runs under LibTorch's autocast, in bf16 or in fp16 with dynamic loss scaling
// (Micikevicius et al., arXiv:1710.03740). Parameters and optimizer stay as they are, usually fp32.
//
//   session.use(pacer::Precision::bf16());
//
// fp16 gradients can overflow: the loss is multiplied by a scale, gradients are unscaled in the optimizer's
// kernel, and a step whose gradients are not finite changes nothing but the scale. All of it stays on the GPU
// with pacer's optimizers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <pacer/optimizers/gradient_guard.h>
#include <pacer/schedulers/hook.h>

namespace pacer {

class Precision : public Hook {
 public:
  // bfloat16 has the range of fp32 and needs no loss scale.
  static Precision bf16();
  static Precision fp16(const LossScaleRule& rule = {});

  std::string hook_name() const override { return "precision"; }
  Slot slot() const override { return Slot::forward; }
  // Throws InvalidArgument for parameters that are fp16 or fp64 themselves.
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  void forward_begin(const Progress& progress) override;
  void forward_end() override;
  at::Tensor scale_loss(at::Tensor loss) override;
  // Loss scale and the number of finite steps since it last changed (fp16).
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

 private:
  Precision(at::ScalarType type, std::optional<LossScaleRule> rule) : type_(type), rule_(rule) {}

  at::ScalarType type_;
  std::optional<LossScaleRule> rule_;
  at::DeviceType device_ = at::kCPU;
  std::shared_ptr<GradientGuard> guard_;  // with a loss scale
  // What autocast was before each forward pass that runs; several where evaluations are nested.
  struct Before {
    bool enabled;
    at::ScalarType type;
  };
  std::vector<Before> before_;
};

}  // namespace pacer
