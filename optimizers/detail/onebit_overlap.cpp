#include <pacer/optimizers/detail/onebit_overlap.h>

#include <utility>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

OneBitOverlap::OneBitOverlap(std::vector<Entry> entries, Calls calls)
    : entries_(std::move(entries)), calls_(std::move(calls)) {
  for (size_t i = 0; i < entries_.size(); ++i) gradients_.put(i, entries_[i].turn);
}

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
  gradients_.reset();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].parameter.requires_grad()) gradients_.set_absent(i);
  }
  is_counting_ = true;
}

size_t OneBitOverlap::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_counting_ = false;
  const size_t started = gradients_.next();
  gradients_.reset();
  return started;
}

bool OneBitOverlap::has_started() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return gradients_.next() > 0;
}

void OneBitOverlap::remember(size_t turn) {
  for (Entry& entry : entries_) {
    if (entry.turn == turn) entry.gradient = SeenTensor(entry.parameter.grad());
  }
}

void OneBitOverlap::check_unchanged() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!gradients_.has_left(i)) continue;
    const Entry& entry = entries_[i];
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
      !gradients_.has_left(i), "parameter ", InMessage{entry.name, entry.parameter.sizes()},
      " received a gradient after its momentum had left; with overlap_backward(true) a parameter gets its "
      "gradient once in the last backward of a step");
  if (!is_counting_ || gradients_.has_arrived(i)) return;
  gradients_.arrive(i);
  while (is_counting_ && gradients_.next_is_full()) {
    is_counting_ = calls_.start(gradients_.next());
    if (is_counting_) remember(gradients_.leave());
  }
  if (gradients_.next() > 0) calls_.progress();
}

}  // namespace pacer::detail
