#include <pacer/optimizers/detail/onebit_overlap.h>

#include <algorithm>
#include <utility>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

std::shared_ptr<OneBitOverlap> OneBitOverlap::on(std::vector<Entry> entries, Calls calls) {
  const auto overlap = std::make_shared<OneBitOverlap>(std::move(entries), std::move(calls));
  for (size_t i = 0; i < overlap->entries_.size(); ++i) {
    add_gradient_hook(overlap->entries_[i].parameter, overlap,
                      [self = overlap.get(), i](const at::Tensor&) { self->arrive(i); });
  }
  return overlap;
}

OneBitOverlap::~OneBitOverlap() {
  for (const Entry& entry : entries_) remove_gradient_hook(entry.parameter, this);
}

// What is frozen is not waited for.
void OneBitOverlap::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_arrived_.assign(entries_.size(), 0);
  waited_.clear();
  for (const Entry& entry : entries_) {
    waited_.resize(std::max(waited_.size(), entry.turn + 1), 0);
    waited_[entry.turn] += entry.parameter.requires_grad();
  }
  next_ = 0;
  is_counting_ = true;
}

size_t OneBitOverlap::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_counting_ = false;
  return std::exchange(next_, 0);
}

bool OneBitOverlap::has_started() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_ > 0;
}

void OneBitOverlap::remember(size_t turn) {
  for (Entry& entry : entries_) {
    if (entry.turn == turn) entry.gradient = SeenTensor(entry.parameter.grad());
  }
}

void OneBitOverlap::check_unchanged() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.turn >= next_) continue;
    require(
        entry.gradient.is_unchanged(entry.parameter.grad()), "the gradient of parameter ",
        InMessage{entry.name, entry.parameter.sizes()},
        " was changed after its momentum had left; with overlap_backward(true) leave gradients as backward "
        "made them");
  }
}

void OneBitOverlap::arrive(size_t i) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Entry& entry = entries_[i];
  require(
      entry.turn >= next_, "parameter ", InMessage{entry.name, entry.parameter.sizes()},
      " received a gradient after its momentum had left; with overlap_backward(true) a parameter gets its "
      "gradient once in the last backward of a step");
  if (!is_counting_ || std::exchange(has_arrived_[i], 1) != 0) return;
  --waited_[entry.turn];
  while (is_counting_ && next_ < waited_.size() && waited_[next_] == 0) {
    is_counting_ = calls_.start(next_);
    if (is_counting_) remember(next_++);
  }
  if (next_ > 0) calls_.progress();
}

}  // namespace pacer::detail
