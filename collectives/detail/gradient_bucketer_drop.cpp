// A window that is given up: what it has sent goes on, in memory of its own, and the next window waits for that.
#include <pacer/collectives/detail/gradient_bucketer_state.h>

#include <utility>

#include <pacer/collectives/detail/gradient_checks.h>

namespace pacer {

// It neither waits nor takes memory, because this rank may be about to leave the others. What is under way may
// still write to the gradients that were sent, so that they are nobody's any more, and the next ones, also those
// of a backward that sends nothing, come into other memory.
void GradientBucketer::State::drop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  withheld_.put_back();
  if (!std::exchange(active_, false)) return;
  was_dropped_ = true;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (works_[b].is_empty()) continue;
    memory_is_lent_ = true;
    for (const size_t position : buckets_[b].parameters) {
      parameters_[position].parameter.mutable_grad().reset();
    }
  }
}

void GradientBucketer::State::renew_memory() {
  if (!memory_is_lent_) return;
  build(order_);
  memory_is_lent_ = false;
}

// Between windows. A bucket that only some ranks have sent would be added to one of the next window.
void GradientBucketer::State::settle_dropped() {
  if (options_.unused_is_zero() && !missed_everywhere_.defined()) {
    is_missed_.resize(parameters_.size());
    tell_missed();  // as ranks did whose backward had ended
  }
  detail::require_same_sent(*world_, "buckets", sent_);
  learn_missed();
  for (Work& work : works_) std::exchange(work, {}).wait();
  was_dropped_ = false;
}

}  // namespace pacer
