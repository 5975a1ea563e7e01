// A Session's window whose passes come in the order of a pipeline's plan, in the place of begin and backward
// for one micro-batch after the other. Whoever uses it runs the passes; step() follows as always.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include <pacer/hooks/detail/forward_scope.h>
#include <pacer/hooks/detail/zeroed_gradients.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/tensor_call.h>

namespace pacer::detail {

class SessionWindow {
 public:
  SessionWindow() = default;
  SessionWindow(const SessionWindow&) = delete;
  virtual ~SessionWindow() = default;

  virtual SessionParts& parts() = 0;
  // Micro-batch `k` as hooks leave it, on the parameters' device; it counts from now on. Where a hook throws,
  // the window is as if it had not begun.
  virtual Tensors begin(int64_t k, Tensors tensors) = 0;
  virtual double weight(int64_t k) const = 0;
  // Around each pass of micro-batch `k`, forward and backward: one without weight leaves no trace.
  virtual ZeroedGradients::Scope pass(int64_t k) = 0;
  // The forward pass of micro-batch `k` as hooks see it, until the scope ends.
  virtual std::unique_ptr<ForwardScope> forward(int64_t k) = 0;
  // What backward begins with. Ranks without a loss call it with zeros, for the hooks that count.
  virtual at::Tensor scaled_loss(int64_t k, const at::Tensor& loss) = 0;
  // Around all backward passes of the window, before the first and behind the last.
  virtual void begin_backward() = 0;
  virtual void end_backward() = 0;
  // Where a pass threw: the window is dropped, and the other ranks are told. Called in the handler; throws.
  [[noreturn]] virtual void fail(const std::exception& error) = 0;
};

}  // namespace pacer::detail
