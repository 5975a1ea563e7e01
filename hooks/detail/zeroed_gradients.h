// Passes that leave no trace, whatever they compute: those of micro-batches of weight 0. Their gradients are
// exactly zero, and 8-bit scales learn nothing of them. Their loss may be a mean over no token, 0 / 0, and
// zero times that is no zero. The pass itself runs, because collectives inside of it and buckets of gradients
// wait for it on other ranks.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/hooks/session_parts.h>

namespace pacer {

class Fp8Scaling;

namespace detail {

// After a pass in such a scope whose forward pass was recorded, because its weight was not known then.
void forget_micro_batch(const SessionParts& parts);

class ZeroedGradients {
 public:
  using Switch = std::atomic<bool>;

  // Switched on while it lives.
  class Scope {
   public:
    Scope(Switch* is_on, Fp8Scaling* scaling) : is_on_(is_on), scaling_(scaling) { set(true); }
    ~Scope() { set(false); }
    Scope(const Scope&) = delete;

   private:
    void set(bool on);

    Switch* is_on_;
    Fp8Scaling* scaling_;
  };

  ZeroedGradients() = default;
  ZeroedGradients(const ZeroedGradients&) = delete;
  ~ZeroedGradients();

  // With `wanted`: while the result lives, a gradient of the model's or the optimizer's parameters becomes
  // zeros before it is added, and 8-bit layers record nothing. Otherwise nothing happens.
  Scope scope(const SessionParts& parts, bool wanted);

 private:
  void watch(const at::Tensor& parameter);

  // Hooks see it, too, which autograd may still hold when this object is gone.
  std::shared_ptr<Switch> is_on_ = std::make_shared<Switch>(false);
  std::vector<std::pair<at::Tensor, unsigned>> hooked_;  // with the hook's position
};

}  // namespace detail
}  // namespace pacer
