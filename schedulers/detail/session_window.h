// A Session's window whose passes come in the order of a pipeline's plan, in the place of begin and backward
// for one micro-batch after the other. Whoever uses it runs the passes; step() follows as always.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include <pacer/modules/tensor_call.h>
#include <pacer/schedulers/detail/forward_scope.h>
#include <pacer/schedulers/detail/gradient_watch.h>
#include <pacer/schedulers/detail/zeroed_gradients.h>
#include <pacer/schedulers/session.h>

namespace pacer::detail {

class SessionWindow {
 public:
  static bool has_hook(const Session& session, const Hook& hook);
  // Throws InvalidArgument where Session::begin would.
  explicit SessionWindow(Session& session);

  SessionParts& parts() { return session_.parts_; }
  // Micro-batch `k` as hooks leave it, on the parameters' device; it counts from now on. Where a hook throws,
  // the window is as if it had not begun.
  Tensors begin(int64_t k, Tensors tensors);
  double weight(int64_t k) const { return weights_[static_cast<size_t>(k)]; }
  // Around each pass of micro-batch `k`, forward and backward: one without weight leaves no trace.
  ZeroedGradients::Scope pass(int64_t k) { return session_.zeroed_->scope(parts(), weight(k) == 0); }
  // The forward pass of micro-batch `k` as hooks see it, until the scope ends.
  std::unique_ptr<ForwardScope> forward(int64_t k);
  // What backward begins with. Ranks without a loss call it with zeros, for the hooks that count.
  at::Tensor scaled_loss(int64_t k, const at::Tensor& loss);
  // Around all backward passes of the window, before the first and behind the last.
  void begin_backward();
  void end_backward();
  // Where a pass threw: the window is dropped, and the other ranks are told. Called in the handler; throws.
  [[noreturn]] void fail(const std::exception& error) { session_.fail_backward(error); }

 private:
  Session& session_;
  std::unique_ptr<GradientWatch::Pass> pass_;  // from begin_backward to end_backward
  std::vector<double> weights_;                // of micro-batches
  std::vector<int64_t> examples_;              // the same
};

}  // namespace pacer::detail
