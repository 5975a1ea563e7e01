// The window that a Session hands out, made of the pieces of its begin and backward.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include <pacer/hooks/detail/session_window.h>
#include <pacer/session/detail/gradient_watch.h>
#include <pacer/session/session.h>

namespace pacer::detail {

class WindowOfSession final : public SessionWindow {
 public:
  static bool has_hook(const Session& session, const Hook& hook);
  // Throws InvalidArgument where Session::begin would.
  explicit WindowOfSession(Session& session);

  SessionParts& parts() override { return session_.parts_; }
  Tensors begin(int64_t k, Tensors tensors) override;
  double weight(int64_t k) const override { return weights_[static_cast<size_t>(k)]; }
  ZeroedGradients::Scope pass(int64_t k) override {
    return session_.zeroed_->scope(session_.parts_, weight(k) == 0);
  }
  std::unique_ptr<ForwardScope> forward(int64_t k) override;
  at::Tensor scaled_loss(int64_t k, const at::Tensor& loss) override;
  void begin_backward() override;
  void end_backward() override;
  [[noreturn]] void fail(const std::exception& error) override { session_.fail_backward(error); }

 private:
  Session& session_;
  std::vector<double> weights_;    // of micro-batches
  std::vector<int64_t> examples_;  // the same
};

}  // namespace pacer::detail
