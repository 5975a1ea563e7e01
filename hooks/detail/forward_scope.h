// The forward pass as hooks see it: forward_begin for all, and forward_end for all, also where one of them
// throws. What a forward_end throws is kept, because destructors end a pass, too.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include <ATen/SequenceNumber.h>

#include <pacer/hooks/batch.h>
#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

class HooksForwardScope final : public ForwardScope {
 public:
  explicit HooksForwardScope(const SessionParts& parts) : parts_(&parts) {
    try {
      for (const auto& hook : parts.hooks()) hook->forward_begin(parts.progress);
    } catch (...) {
      HooksForwardScope::end();
      throw;
    }
  }
  ~HooksForwardScope() override { HooksForwardScope::end(); }
  void end() noexcept override {
    if (parts_ == nullptr) return;
    for (const auto& hook : parts_->hooks()) {
      try {
        hook->forward_end();
      } catch (...) {
        if (!failure_) failure_ = std::current_exception();
      }
    }
    parts_ = nullptr;
    was_unused_ = at::sequence_number::peek() == first_node_;
  }
  bool was_unused() const override { return was_unused_; }
  void throw_failure() override {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  const SessionParts* parts_;
  uint64_t first_node_ = at::sequence_number::peek();  // of autograd's graph, that this thread makes next
  bool was_unused_ = false;
  std::exception_ptr failure_;  // the first
};

}  // namespace pacer::detail
