// A curriculum of attention (Zhu et al., "SkyLadder", arXiv:2503.15450): sequences stay whole, and the window in
// which causal attention looks back grows from short to full length.
//
//   session.use(pacer::WindowLength(model->window, pacer::LengthSchedule(64, 1024).ramp_steps(10'000)));
//
// The model calls window.attend(q, k, v), or window.mask(...) for an attention of its own. The window is in force
// in the forward passes of training, and in what they recompute. Everywhere else, in evaluation, prewarm and a
// pass outside of begin and backward, it is the whole sequence.
#pragma once

#include <string>

#include <pacer/hooks/hook.h>
#include <pacer/modules/attention_window.h>
#include <pacer/schedulers/length_schedule.h>

namespace pacer {

class WindowLength : public Hook {
 public:
  // Lengths in tokens. A window that is as long as the sequence, or longer, changes nothing. Throws
  // InvalidArgument for a schedule without a way from first to last.
  WindowLength(AttentionWindow window, LengthSchedule schedule);
  WindowLength(WindowLength&& other) noexcept;
  ~WindowLength() override;

  std::string hook_name() const override { return "window_length"; }
  Slot slot() const override { return Slot::forward; }
  bool settled(const Progress& progress) const override { return schedule_.settled(progress); }
  std::string agreement() const override;
  // Throws InvalidArgument where another Session has the window.
  void attach(SessionParts& parts) override;
  void begin(const Progress& progress, MicroBatch& batch) override;
  void forward_begin(const Progress& progress) override;
  void forward_end() override;
  bool acts_in_forward() const override { return true; }
  // Throws InvalidArgument where the model has never asked for the window.
  void gradients_ready(const Progress& progress) override;
  void after_step(StepReport& report) override;

 private:
  AttentionWindow window_;
  LengthSchedule schedule_;
  const SessionParts* parts_ = nullptr;  // once attached
  bool trains_ = false;       // between begin and the end of its step: other passes are no training
  int64_t asked_before_ = 0;  // in all passes before the first that trains
  bool has_trained_ = false;
  int64_t length_ = 0;  // of the last micro-batch
};

}  // namespace pacer
