// Backward passes that contribute exactly zero gradients, whatever they compute: those of micro-batches of
// weight 0. Their loss may be a mean over no token, 0 / 0, and zero times that is no zero. The pass itself
// runs, because collectives inside of it and buckets of gradients wait for it on other ranks.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

class ZeroedGradients {
 public:
  using Switch = std::atomic<bool>;

  // Switched on while it lives.
  class Scope {
   public:
    explicit Scope(Switch* is_on) : is_on_(is_on) {
      if (is_on_ != nullptr) *is_on_ = true;
    }
    ~Scope() {
      if (is_on_ != nullptr) *is_on_ = false;
    }
    Scope(const Scope&) = delete;

   private:
    Switch* is_on_;
  };

  ZeroedGradients() = default;
  ZeroedGradients(const ZeroedGradients&) = delete;
  ~ZeroedGradients();

  // With `wanted`: while the result lives, a gradient of the model's or the optimizer's parameters becomes
  // zeros before it is added. Otherwise nothing happens.
  Scope scope(const SessionParts& parts, bool wanted);

 private:
  void watch(const at::Tensor& parameter);

  // Hooks see it, too, which autograd may still hold when this object is gone.
  std::shared_ptr<Switch> is_on_ = std::make_shared<Switch>(false);
  std::vector<std::pair<at::Tensor, unsigned>> hooked_;  // with the hook's position
};

}  // namespace pacer::detail
