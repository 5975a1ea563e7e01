// How far causal attention looks back, as a number that a training may change: sequences stay whole, and a
// position sees the last ones only (Zhu et al., "SkyLadder", arXiv:2503.15450). When the window grows is
// decided elsewhere: by the hook WindowLength, or by the loop.
//
//   torch::Tensor attend(torch::Tensor q, torch::Tensor k, torch::Tensor v) { return window.attend(q, k, v); }
//
//   pacer::AttentionWindow window;  // a member of the model, or of several of its layers
//   session.use(pacer::WindowLength(model->window, pacer::LengthSchedule(64, 1024).ramp_steps(10'000)));
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

namespace pacer {

// What a window of w tokens leaves of causal attention.
enum class WindowForm {
  blocks,  // the sequence is cut into pieces of w tokens, which do not see each other: what a context of w sees
  sliding,  // every position sees the last w, itself included
};

// A shared handle: copies are one window. It is not for several threads at once.
class AttentionWindow {
 public:
  explicit AttentionWindow(WindowForm form = WindowForm::blocks);

  WindowForm form() const;
  // The present window in tokens; nothing: the whole sequence, as in a new one. A region that is recomputed in
  // backward (pacer/modules/recompute.h) sees the one of its forward.
  std::optional<int64_t> length() const;
  // Throws InvalidArgument for a length below 1. WindowLength sets it for the forward passes of a training.
  void set_length(std::optional<int64_t> length);

  // Returns what scaled_dot_product_attention takes as attn_mask for `sequence` tokens, [sequence, sequence],
  // causal also where the window is the whole sequence: bool (true takes part), also where `options` has no
  // dtype, or floating point, 0 or -infinity, which is added. It is kept until the window, the dtype, the device
  // or `sequence` is another one, so it must not be written to. Throws InvalidArgument for other dtypes, and
  // Error in a captured CUDA graph while the window is shorter than the sequence.
  at::Tensor mask(int64_t sequence, const at::TensorOptions& options) const;

  // Causal attention inside the window. q, k, v [batch, heads, sequence, channels], the channels of v may be
  // others, and k and v may have fewer heads, which divide those of q; returns the shape of q with the channels of
  // v. No mask is made for blocks, and none where the
  // window is the whole sequence, so that LibTorch may take its fastest kernel. Throws as mask() does, and
  // InvalidArgument for other shapes.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    double dropout_p = 0) const;

  // How often length(), mask() or attend() was asked; a hook sees by it whether the model uses the window.
  int64_t times_asked() const;
  // For a hook: takes the window for one Session, and gives it back. Throws InvalidArgument where another one
  // has it.
  void enter_session();
  void leave_session();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pacer
