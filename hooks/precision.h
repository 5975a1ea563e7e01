// Mixed precision: forward runs under LibTorch's autocast, in bf16 or in fp16 with dynamic loss scaling
// (Micikevicius et al., arXiv:1710.03740). Parameters and optimizer stay as they are, usually fp32.
//
//   session.use(pacer::Precision::bf16());
//   session.use(pacer::Precision::fp8());  // bf16, and every pacer::modules::Linear multiplies 8-bit floats
//
// fp16 gradients can overflow: the loss is multiplied by a scale, gradients are unscaled in the optimizer's
// kernel, and a step whose gradients are not finite changes nothing but the scale. All of it stays on the GPU
// with pacer's optimizers.
//
// fp8: modules/fp8_scaling.h says what is cast, and how it is scaled. Scales move once per step, with the
// largest magnitudes over all ranks; a step whose gradients are not finite changes nothing, scales included.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <pacer/hooks/hook.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer {

class Precision : public Hook {
 public:
  // bfloat16 has the range of fp32 and needs no loss scale.
  static Precision bf16();
  static Precision fp16(const LossScaleRule& rule = {});
  // The model must be on the device where it trains.
  static Precision fp8(const Fp8Options& options = {});

  std::string hook_name() const override { return "precision"; }
  Slot slot() const override { return Slot::forward; }
  // Throws InvalidArgument for parameters that are fp16 or fp64 themselves; fp8 throws what Fp8Scaling does.
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  void start(const Progress& progress) override;
  void begin(const Progress& progress, MicroBatch& batch) override;
  void forward_begin(const Progress& progress) override;
  void forward_end() override;
  bool acts_in_forward() const override { return true; }
  at::Tensor scale_loss(at::Tensor loss) override;
  void gradients_ready(const Progress& progress) override;
  // fp8 adds how many calls of layers ran in 16 bits since the last report: "calls_in_16_bits".
  void after_step(StepReport& report) override;
  // Loss scale and the number of finite steps since it last changed (fp16); scales and histories (fp8).
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

 private:
  Precision(at::ScalarType type, std::optional<LossScaleRule> rule) : type_(type), rule_(rule) {}

  at::ScalarType type_;
  std::optional<LossScaleRule> rule_;
  at::DeviceType device_ = at::kCPU;
  std::shared_ptr<GradientGuard> guard_;  // with a loss scale
  // What was before each forward pass that runs; several where evaluations are nested.
  struct Before {
    bool enabled;
    at::ScalarType type;
    std::shared_ptr<Fp8Scaling> scaling;
  };
  std::vector<Before> before_;

  std::optional<Fp8Options> fp8_;
  std::shared_ptr<Fp8Scaling> scaling_;
  SessionParts* parts_ = nullptr;  // with fp8
  bool is_between_steps_ = true;   // scales have recorded nothing since the last update
  int64_t reported_calls_ = 0;
};

}  // namespace pacer
