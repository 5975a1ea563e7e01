// Gradients come, bucket after bucket leaves, and sums come back: a window of a GradientBucketer from beginning to
// end. Which gradient is in which bucket is in detail/gradient_bucketer_state.cpp.
#include <pacer/collectives/gradient_bucketer.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <pacer/collectives/detail/gradient_bucketer_state.h>
#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/core/error.h>

namespace pacer {

void GradientBucketer::begin_backward(const std::vector<at::Tensor>& zero,
                                      const std::vector<at::Tensor>& done) {
  if (state_->was_dropped_) state_->settle_dropped();
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(!state_->active_, "GradientBucketer::begin_backward before wait() of the window before");
  state_->begin(zero, done);
}

void GradientBucketer::State::begin(const std::vector<at::Tensor>& zero,
                                    const std::vector<at::Tensor>& done) {
  renew_memory();
  gradients_.reset();
  works_.assign(buckets_.size(), {});
  sent_ = sent_early_ = 0;
  arrivals_.clear();
  order_shows_ = zero.empty() && done.empty() && scope_ != GradientScope::rank;
  active_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (stays_local(i)) gradients_.arrive(i);
  }
  for (const at::Tensor& parameter : zero) {
    const size_t position = position_of(parameter);
    if (position == parameters_.size() || !gradients_.is_awaited(position)) continue;
    set_zero(position);
    gradients_.set_absent(position);
  }
  for (const at::Tensor& parameter : done) {
    const size_t position = position_of(parameter);
    if (position == parameters_.size() || !gradients_.is_awaited(position)) continue;
    if (!parameter.grad().defined()) set_zero(position);
    gradients_.arrive(position);
  }
  send_full_buckets();
}

// Runs where autograd computes, right after the gradient was added to.
void GradientBucketer::State::arrive(size_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const detail::BucketedParameter& entry = parameters_[position];
  if (stays_local(position)) return check_dense(position);
  if (!active_) {
    // What adds up in fp32 is rounded once, with the window's last gradient.
    const bool is_wide = entry.parameter.grad().scalar_type() != entry.parameter.scalar_type();
    return is_wide ? check_dense(position) : put_in_place({position});
  }
  require(!gradients_.has_left(position), "parameter ", entry.name,
          " received a gradient after its bucket had been sent; a layer given to LayerDrop::add must not be "
          "used elsewhere, and a parameter must not get gradients twice in one backward");
  check_dense(position);
  if (!gradients_.arrive(position)) return put_in_place({position});
  if (!order_is_learned_) arrivals_.push_back(position);
  send_full_buckets();
}

void GradientBucketer::State::check_dense(size_t position) const {
  detail::check_dense(parameters_[position].name, parameters_[position].parameter.grad());
}

// Gradients to where they are reduced; those of flat memory in one kernel. They must be defined.
void GradientBucketer::State::put_in_place(const std::vector<size_t>& positions) {
  std::vector<at::Tensor> from, to;
  for (const size_t position : positions) {
    check_dense(position);
    detail::BucketedParameter& entry = parameters_[position];
    at::Tensor& gradient = entry.parameter.mutable_grad();
    if (!entry.view.defined() || memory_is_lent_) {
      detail::make_own(gradient, entry.parameter);
      continue;
    }
    if (gradient.const_data_ptr() == entry.view.const_data_ptr()) continue;
    from.push_back(gradient);
    to.push_back(entry.view);
    gradient = entry.view;
  }
  const at::NoGradGuard no_grad;
  if (!from.empty()) at::_foreach_copy_(to, from);
}

void GradientBucketer::State::set_zero(size_t position) {
  const at::NoGradGuard no_grad;
  detail::BucketedParameter& entry = parameters_[position];
  at::Tensor& gradient = entry.parameter.mutable_grad();
  if (!entry.view.defined()) {
    gradient = detail::zero_gradient(entry.parameter);
    return;
  }
  entry.view.zero_();
  gradient = entry.view;
}

void GradientBucketer::State::send_full_buckets() {
  while (gradients_.next_is_full()) send(gradients_.leave());
}

void GradientBucketer::State::send(size_t number) {
  detail::Bucket& bucket = buckets_[number];
  if (stays_local(bucket.parameters.front())) return;  // as all of its bucket
  const bool all_zero = std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                                    [&](size_t position) { return gradients_.is_absent(position); });
  if (all_zero) return;
  put_in_place(bucket.parameters);
  works_[number] = bucket.flat.defined() ? send_flat(bucket) : send_in_place(bucket);
  ++sent_;
}

Work GradientBucketer::State::send_flat(detail::Bucket& bucket) {
  const at::NoGradGuard no_grad;
  // As a tensor: a plain number would be rounded to the gradients' dtype first.
  if (prescale_ != 1) bucket.flat.mul_(at::scalar_tensor(prescale_, at::kFloat));
  if (bucket.wire.defined()) bucket.wire.copy_(bucket.flat);
  const at::Tensor& sent = bucket.wire.defined() ? bucket.wire : bucket.flat;
  const auto options = CollectiveOptions().agreed(true);
  if (scope_of(bucket.parameters.front()) == GradientScope::node) {
    return world_->node()->all_reduce(sent, CollectiveOptions(options).ordered_sum(true));
  }
  return world_->all_reduce(sent, options);
}

Work GradientBucketer::State::send_in_place(const detail::Bucket& bucket) {
  std::vector<at::Tensor> gradients;
  for (const size_t position : bucket.parameters) {
    gradients.push_back(detail::flat_view(parameters_[position].parameter.grad()));
  }
  const auto options = CollectiveOptions().agreed(true);
  const auto wire = wire_dtype_of(bucket);
  if (scope_of(bucket.parameters.front()) == GradientScope::node) {
    return world_->node()->all_reduce_coalesced(gradients, wire.value_or(bucket.dtype),
                                                CollectiveOptions(options).ordered_sum(true));
  }
  return wire ? world_->all_reduce_coalesced(gradients, *wire, options)
              : world_->all_reduce_coalesced(gradients, options);
}

void GradientBucketer::end_backward() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(state_->active_, "GradientBucketer::end_backward without begin_backward");
  state_->sent_early_ = state_->sent_;
  state_->send_the_rest();
  for (size_t i = 0; i < state_->parameters_.size(); ++i) {
    if (!state_->stays_local(i)) state_->withheld_.withhold(i);
  }
}

void GradientBucketer::reduce(const std::vector<at::Tensor>& zero) {
  begin_backward(zero);
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  state_->order_shows_ = false;
  state_->send_the_rest();
}

// Also of parameters that only an earlier backward of the window has reached, or none.
void GradientBucketer::State::send_the_rest() {
  std::vector<std::string> missed;
  is_missed_.assign(parameters_.size(), 0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients_.is_awaited(i) || parameters_[i].parameter.grad().defined()) continue;
    is_missed_[i] = 1;
    missed.push_back(parameters_[i].name);
  }
  if (!options_.unused_is_zero()) detail::require_all_reached(missed, parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients_.is_awaited(i)) continue;
    if (is_missed_[i] != 0) set_zero(i);
    gradients_.arrive(i);
  }
  send_full_buckets();
  if (options_.unused_is_zero()) tell_missed();
}

// Beside the buckets: what no rank has reached has no gradient, whatever their sum is.
void GradientBucketer::State::tell_missed() {
  const auto count = static_cast<int64_t>(is_missed_.size());
  missed_here_ = at::empty({count}, at::kByte);
  std::copy(is_missed_.begin(), is_missed_.end(), missed_here_.mutable_data_ptr<uint8_t>());
  missed_everywhere_ = at::empty({world_->world_size(), count}, at::kByte);
  missed_work_ = world_->all_gather_host(missed_everywhere_, missed_here_);
}

// From what this rank has missed to what all have.
void GradientBucketer::State::learn_missed() {
  if (!missed_everywhere_.defined()) return;
  std::exchange(missed_work_, {}).wait();
  const at::Tensor all = std::exchange(missed_everywhere_, {});
  const auto* of_ranks = all.const_data_ptr<uint8_t>();
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    for (size_t i = 0; i < is_missed_.size(); ++i) {
      if (of_ranks[static_cast<size_t>(rank) * is_missed_.size() + i] == 0) is_missed_[i] = 0;
    }
  }
}

void GradientBucketer::wait() {
  std::exception_ptr touched;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex_);
    require(state_->active_, "GradientBucketer::wait without begin_backward");
    state_->active_ = false;
    try {
      state_->withheld_.give_back();
    } catch (const InvalidArgument&) {
      touched = std::current_exception();
    }
  }
  // Whatever somebody did to a gradient: what is under way writes to where the next one goes.
  try {
    state_->finish_window(/*tells_arrivals=*/touched == nullptr);
  } catch (...) {
    if (touched == nullptr) throw;
  }
  if (touched != nullptr) std::rethrow_exception(touched);
}

void GradientBucketer::State::finish_window(bool tells_arrivals) {
  const at::NoGradGuard no_grad;
  learn_missed();
  std::exception_ptr failed;  // of who was told of an arrival; the sums behind it come all the same
  for (size_t b = 0; b < buckets_.size(); ++b) {
    works_[b].wait();
    if (!works_[b].is_empty() && buckets_[b].wire.defined()) buckets_[b].flat.copy_(buckets_[b].wire);
    for (const size_t position : buckets_[b].parameters) {
      if (is_missed_[position] != 0) parameters_[position].parameter.mutable_grad().reset();
    }
    if (!on_arrival_ || !tells_arrivals || failed != nullptr) continue;
    try {
      tell_arrival(buckets_[b]);
    } catch (...) {
      failed = std::current_exception();
    }
  }
  works_.clear();
  if (!order_is_learned_ && order_shows_) learn_order();
  if (failed != nullptr) std::rethrow_exception(failed);
}

void GradientBucketer::State::tell_arrival(const detail::Bucket& bucket) {
  std::vector<at::Tensor> parameters;
  for (const size_t position : bucket.parameters) parameters.push_back(parameters_[position].parameter);
  on_arrival_(parameters);
}

// It neither waits nor takes memory, because this rank may be about to leave the others. What is under way may
// still write to the gradients that were sent, so that they are nobody's any more, and the next ones, also those
// of a backward that sends nothing, come into other memory.
void GradientBucketer::drop() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  state_->withheld_.put_back();
  if (!std::exchange(state_->active_, false)) return;
  state_->was_dropped_ = true;
  for (size_t b = 0; b < state_->buckets_.size(); ++b) {
    if (state_->works_[b].is_empty()) continue;
    state_->memory_is_lent_ = true;
    for (const size_t position : state_->buckets_[b].parameters) {
      state_->parameters_[position].parameter.mutable_grad().reset();
    }
  }
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
