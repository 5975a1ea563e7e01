// A window: gradients fill buckets, which are sent in order, and become sums over ranks.
#include <pacer/collectives/detail/gradient_bucketer_state.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>

namespace pacer {
void GradientBucketer::State::add(const std::vector<NamedParameter>& parameters,
                                  const std::vector<at::Tensor>& may_stay_local) {
  for (const auto& [name, parameter] : parameters) {
    detail::check_reducible(name, parameter, *world_);
    if (!parameter.requires_grad() || positions_.count(parameter.unsafeGetTensorImpl())) continue;
    positions_.emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
    const bool local = std::any_of(may_stay_local.begin(), may_stay_local.end(),
                                   [&it = parameter](const at::Tensor& other) { return other.is_same(it); });
    parameters_.push_back({name, parameter, local, {}});
    withheld_.add(name, parameter);
    if (parameter.scalar_type() == at::kHalf) prescale_ = 1.0 / world_->world_size();
  }
  // Backward finishes the last layers first.
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  build(order);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    detail::add_gradient_hook(parameters_[i].parameter, shared_from_this(),
                              [this, i](const at::Tensor&) { arrive(i); });
  }
}

void GradientBucketer::State::build(const std::vector<size_t>& order) {
  order_ = order;
  // Alike on all ranks. Gradients that are divided before they are added are not worth a way of their own.
  const bool in_place = options_.in_place().value_or(world_->coalesces()) && prescale_ == 1;
  const int64_t bytes = options_.bucket_bytes().value_or(detail::default_bucket_bytes(parameters_, in_place));
  buckets_ = detail::make_buckets(parameters_, order, bytes, options_.first_bucket_bytes());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const size_t position : buckets_[b].parameters) gradients_.put(position, b);
  }
  if (in_place) return;
  for (detail::Bucket& bucket : buckets_) {
    detail::make_flat(bucket, parameters_);
    if (const auto wire = wire_dtype_of(bucket)) {
      bucket.wire = at::empty_like(bucket.flat, bucket.flat.options().dtype(*wire));
    }
  }
}

std::optional<at::ScalarType> GradientBucketer::State::wire_dtype_of(const detail::Bucket& bucket) const {
  const auto wire = options_.wire_dtype();
  return wire && bucket.dtype == at::kFloat && *wire != at::kFloat ? wire : std::nullopt;
}

int64_t GradientBucketer::State::bytes_of(const detail::Bucket& bucket) const {
  int64_t elements = bucket.elements;
  const auto wire = wire_dtype_of(bucket);
  if (!bucket.flat.defined() && !wire) {  // without padding
    elements = 0;
    for (const size_t position : bucket.parameters) elements += parameters_[position].parameter.numel();
  }
  return elements * static_cast<int64_t>(at::elementSize(wire.value_or(bucket.dtype)));
}

size_t GradientBucketer::State::position_of(const at::Tensor& parameter) const {
  const auto found = positions_.find(parameter.unsafeGetTensorImpl());
  return found == positions_.end() ? parameters_.size() : found->second;
}

void GradientBucketer::State::begin(const std::vector<at::Tensor>& zero,
                                    const std::vector<at::Tensor>& done) {
  if (was_dropped_) settle_dropped();
  const std::lock_guard<std::mutex> lock(mutex_);
  require(!active_, "GradientBucketer::begin_backward before wait() of the window before");
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

void GradientBucketer::State::tell_arrival(const detail::Bucket& bucket) {
  std::vector<at::Tensor> parameters;
  for (const size_t position : bucket.parameters) parameters.push_back(parameters_[position].parameter);
  on_arrival_(parameters);
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

void GradientBucketer::State::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  require(active_, "GradientBucketer::end_backward without begin_backward");
  sent_early_ = sent_;
  send_the_rest();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!stays_local(i)) withheld_.withhold(i);
  }
}

void GradientBucketer::State::reduce(const std::vector<at::Tensor>& zero) {
  begin(zero, {});
  const std::lock_guard<std::mutex> lock(mutex_);
  order_shows_ = false;
  send_the_rest();
}

void GradientBucketer::State::wait() {
  std::exception_ptr touched;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(active_, "GradientBucketer::wait without begin_backward");
    active_ = false;
    try {
      withheld_.give_back();
    } catch (const InvalidArgument&) {
      touched = std::current_exception();
    }
  }
  // Whatever somebody did to a gradient: what is under way writes to where the next one goes.
  try {
    finish_window(/*tells_arrivals=*/touched == nullptr);
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

void GradientBucketer::State::set_scope(GradientScope scope) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require(!active_, "GradientBucketer::set_scope belongs between windows");
  if (scope == GradientScope::node) world_->node();  // made here, where all ranks are, and not in backward
  scope_ = scope;
}

}  // namespace pacer
