// What a Session owns between two calls: the gradients of its optimizer's parameters, from a window's first
// backward to its step. Gradients that are there before do not count; a backward of somebody else's in
// between, and gradients that vanish, are errors. What a user writes to gradients counts, as it does without
// a Session. Nothing here waits for a GPU, but for one look at gradients that somebody wrote to inside a
// window.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/device/detail/seen_tensor.h>
#include <pacer/hooks/batch.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

class GradientWatch {
 public:
  explicit GradientWatch(const SessionParts& parts)
      : warns_of_leftovers_(parts.is_first_rank()),
        warns_of_update_(parts.is_first_rank()),
        warns_of_scope_(parts.is_first_rank()) {}
  GradientWatch(const GradientWatch&) = delete;
  ~GradientWatch();

  // Before a backward pass, and before whatever prepares it. `is_first`: of its window: gradients that are
  // there are cleared, with a warning. In later passes throws InvalidArgument where all gradients of the
  // window are gone or were set to zero, or where one came from somebody else's backward; gradients of
  // parameters that have joined or were frozen since are cleared.
  void begin_pass(const SessionParts& parts, bool is_first);
  // Gradients that arrive from here on are the Session's, until end_pass() or forget().
  void expect_gradients() { arrivals_->are_expected = true; }
  // Behind the pass.
  void end_pass(const SessionParts& parts);
  // Before what follows from the pass. Throws where a gradient came from somebody else's backward; gradients
  // of parameters that have joined since are cleared; warns where all parameters were changed.
  void check(const SessionParts& parts);
  // Whether the window's last pass left a gradient anywhere.
  bool has_seen_any() const;
  // Returns the optimizer's parameters that were added or unfrozen since the window's last pass; all, where
  // others were taken out of its list.
  std::vector<at::Tensor> joined_since_pass() const;
  // The window ends.
  void forget();

  // Warns once where a Batch ended before the forward pass, with all that begin had switched on for it: call
  // it before backward ends the scope.
  void check_scope(const SessionParts& parts, const ForwardScope& scope);

 private:
  void follow_list(const SessionParts& parts);
  void clear_leftovers(const SessionParts& parts);
  void clear_frozen();
  void check_arrivals(const SessionParts& parts) const;
  void check_update();
  bool all_are_gone() const;
  bool all_became_zero();

  std::vector<at::Tensor> parameters_;  // the optimizer's, in order, which have hooks
  std::shared_ptr<UnexpectedGradients> arrivals_ = std::make_shared<UnexpectedGradients>();
  // Both have one element for each parameter, behind the last pass of a window; they are empty between
  // windows.
  std::vector<SeenTensor> gradients_;
  std::vector<int64_t> versions_;  // of the parameter; kNoGradient or kFrozen where it had none
  bool writing_is_meant_ = false;  // somebody writes to gradients, and not zeros
  OnceOnFirstRank warns_of_leftovers_, warns_of_update_, warns_of_scope_;
};

}  // namespace pacer::detail
