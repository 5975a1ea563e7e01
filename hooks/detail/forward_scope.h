// The forward pass as hooks see it: forward_begin for all, and forward_end for all, also where one of them
// throws.
#pragma once

#include <cstdint>

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
    for (const auto& hook : parts_->hooks()) hook->forward_end();
    parts_ = nullptr;
    was_unused_ = at::sequence_number::peek() == first_node_;
  }
  bool was_unused() const override { return was_unused_; }

 private:
  const SessionParts* parts_;
  uint64_t first_node_ = at::sequence_number::peek();  // of autograd's graph, that this thread makes next
  bool was_unused_ = false;
};

}  // namespace pacer::detail
