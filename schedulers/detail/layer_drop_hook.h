// What a Session does for a LayerDrop: tells the gates their micro-step, and which parameters were dropped.
#pragma once

#include <string>
#include <vector>

#include <pacer/hooks/hook.h>
#include <pacer/schedulers/layer_drop.h>

namespace pacer::detail {

class LayerDropHook : public Hook {
 public:
  explicit LayerDropHook(LayerDrop gates) : gates_(std::move(gates)) {}
  ~LayerDropHook() override;

  std::string hook_name() const override { return "layer_drop"; }
  Slot slot() const override { return Slot::forward; }
  void attach(SessionParts& parts) override;
  void arrange() override { gates_->refresh_parameters(); }
  // Until the warm-up of a schedule is over; theta that follows gamma counts as settled.
  bool settled(const Progress& progress) const override;
  std::string agreement() const override;
  void start(const Progress& progress) override;
  std::vector<at::Tensor> unused(const Progress& window) const override;
  void forward_begin(const Progress& progress) override { gates_->set_progress(progress); }
  bool acts_in_forward() const override { return true; }
  void gradients_ready(const Progress& window) override;
  void after_step(StepReport& report) override;

 private:
  LayerDrop gates_;
  const SessionParts* parts_ = nullptr;  // once attached
  double kept_layers_ = 0, theta_ = 1;   // of the step
};

}  // namespace pacer::detail
