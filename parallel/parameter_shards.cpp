// A backward pass: gradients come together, travel, and become the sums of this rank's parts. Which parameters
// travel together is in detail/parameter_shards_units.cpp, and where in detail/parameter_shards_memory.cpp.
#include <pacer/parallel/parameter_shards.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/core/error.h>
#include <pacer/parallel/detail/parameter_shards_state.h>

namespace pacer {
namespace {

CollectiveOptions agreed() { return CollectiveOptions().agreed(true); }

}  // namespace

void ParameterShards::begin_backward(const Pass& pass) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(!state_->active_, "ParameterShards::begin_backward before end_backward of the pass before");
  state_->begin(pass);
}

void ParameterShards::State::begin(const Pass& pass) {
  settle_dropped();
  if (!std::exchange(has_begun_, true)) sums_sent_ = replications_sent_ = 0;
  require_in_place();
  withheld_.put_back();
  for (Unit& unit : units_) {
    if (!unit.work.is_empty()) finish(unit);  // of the pass before
  }
  pass_ = pass;
  std::vector<char> absent;
  set_absent(pass.absent, absent);
  set_absent(options_.reduce_every_backward() ? pass.absent : pass.absent_in_all, absent_in_all_);
  gradients_.reset();
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (absent[i] || !unit_of(i).is_trained) gradients_.set_absent(i);
  }
  newest_sent_ = nullptr;
  active_ = true;
  send_full_units();
}

// Runs where autograd computes, right after the gradient was added to.
void ParameterShards::State::land(size_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t group = unit_of(position).group;
  // A parameter that got its gradient is not read any more in this backward.
  if (keeps_parts_) count(group, groups_[group].landings);
  if (!active_) return;  // a pass of somebody else's, whose gradients stay where they are
  const Part& part = parts_[position];
  if (unit_of(position).is_split_by_rows) return require_no_gradient(part);
  require(!gradients_.has_left(position), "parameter ", part.name,
          " received a gradient after its unit had been sent; a layer that LayerDrop drops must not be used "
          "elsewhere, and a parameter must not get gradients twice in one backward");
  detail::check_dense(part.name, part.parameter.grad());
  copy_gradient(position);
  gradients_.arrive(position);
  was_reached_[position] = 1;
  send_full_units();
}

// To where the unit's gradients come together; at most one of them exists twice.
void ParameterShards::State::copy_gradient(size_t position) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parts_[position].parameter.mutable_grad();
  const at::Tensor place = place_of(position);
  const bool adds = gradients_.has_arrived(position) || has_contributed_[position];
  adds ? place.add_(gradient) : place.copy_(gradient);
  gradient.reset();
  has_contributed_[position] = !options_.reduce_every_backward();
}

at::Tensor ParameterShards::State::place_of(size_t position) {
  Unit& unit = unit_of(position);
  const at::Tensor& parameter = parts_[position].parameter;
  make_landing(unit);
  return unit.landing.narrow(0, unit.layout.begin(place_in_unit_[position]), parameter.numel())
      .view(parameter.sizes());
}

void ParameterShards::State::send_full_units() {
  if (!sends()) return;
  while (gradients_.next_is_full()) send(units_[gradients_.leave()]);
}

void ParameterShards::State::send(Unit& unit) {
  if (!unit.is_trained || unit.is_split_by_rows) return;
  const bool is_absent = std::all_of(unit.members.begin(), unit.members.end(), [&](size_t position) {
    return absent_in_all_[position] != 0 && !gradients_.has_arrived(position);
  });
  if (is_absent) return;
  const at::NoGradGuard no_grad;
  if (keeps_parts_) history_.push_back({Operation::Kind::sum, unit.group});
  for (const size_t position : unit.members) {
    if (!gradients_.has_arrived(position) && !has_contributed_[position]) place_of(position).zero_();
  }
  unit.landing = unit.landing.to(unit.gradient.scalar_type());  // rounds what added up in fp32
  // As a tensor: a plain number would be rounded to the gradients' dtype first.
  if (prescale_ != 1) unit.landing.mul_(at::scalar_tensor(prescale_, at::kFloat));
  take_gradient(unit);
  if (unit.has_gradient) unit.sum = at::empty_like(unit.gradient);
  Unit* const before = std::exchange(newest_sent_, &unit);
  CollectiveOptions options = agreed();
  if (stays_local(unit)) options.ordered_sum(true);
  unit.work = ranks_->reduce_scatter(unit.has_gradient ? unit.sum : unit.gradient, unit.landing, options);
  unit.has_gradient = true;
  ++sums_sent_;
  if (before != nullptr && pass_.is_last) add_over_replicas(*before);
}

// Of units one behind the other, in the order in which they were sent: all ranks send in the same one.
void ParameterShards::State::add_over_replicas(Unit& unit) {
  if (replicas_ == nullptr || stays_local(unit)) return;
  if (std::exchange(unit.is_replicated, true)) return;
  finish(unit);
  round_sum(unit);
  unit.replication = replicas_->all_reduce(unit.gradient, agreed());
  ++replications_sent_;
}

// The sum has come; its memory is free again.
void ParameterShards::State::finish(Unit& unit) {
  if (!unit.work.is_empty()) {
    unit.work.wait();
    unit.work = {};  // it holds its tensors
    if (unit.sum.defined()) add_sum(unit);
    unit.sum.reset();
  }
  const bool is_reused = !groups_.empty() && options_.reduce_every_backward();
  if (unit.landing.defined() && is_reused) memory_.give_back(unit.landing);
  unit.landing.reset();
  for (LandingBuffer& buffer : landing_buffers_) {
    if (buffer.user == &unit) buffer.user = nullptr;
  }
}

void ParameterShards::State::add_sum(Unit& unit) const {
  if (!adds_up_wide(unit)) {
    unit.gradient.add_(unit.sum);
    return;
  }
  if (!unit.wide.defined()) unit.wide = unit.gradient.to(at::kFloat);
  unit.wide.add_(unit.sum);
}

// Behind the last pass.
void ParameterShards::State::round_sum(Unit& unit) {
  if (unit.wide.defined()) unit.gradient.copy_(std::exchange(unit.wide, at::Tensor()));
}

void ParameterShards::State::require_all_reached() const {
  std::vector<std::string> missed;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (gradients_.is_awaited(i) && was_reached_[i] == 0) missed.push_back(parts_[i].name);
  }
  detail::require_all_reached(missed, parts_.size());
}

void ParameterShards::end_backward() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(state_->active_, "ParameterShards::end_backward without begin_backward");
  if (state_->pass_.is_last && !state_->options_.unused_is_zero()) state_->require_all_reached();
  state_->gradients_.set_rest_absent();
  state_->send_full_units();
  if (!state_->keeps_gathered()) state_->release_all();
  state_->active_ = false;
  for (size_t i = 0; i < state_->parts_.size(); ++i) {
    if (state_->unit_of(i).is_trained) state_->withheld_.withhold(i);
  }
}

void ParameterShards::reduce(const std::vector<at::Tensor>& absent_in_all, bool stays_local) {
  state_->pass_.stays_local = stays_local;
  if (state_->options_.reduce_every_backward()) return;  // all of it has been
  begin_backward({true, {}, absent_in_all, stays_local});
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  state_->gradients_.set_rest_absent();
  state_->send_full_units();
  state_->active_ = false;
}

void ParameterShards::wait() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  std::exception_ptr touched;
  try {
    state_->require_untouched();
  } catch (const InvalidArgument&) {
    touched = std::current_exception();
  }
  // Whatever somebody did to a gradient, it must not come into the next sum.
  try {
    state_->finish_all();
  } catch (...) {
    if (touched == nullptr) throw;
  }
  if (touched != nullptr) std::rethrow_exception(touched);
}

void ParameterShards::State::require_untouched() {
  withheld_.give_back();
  for (const Part& part : parts_) {
    require(
        !part.parameter.grad().defined(), "parameter ", part.name,
        " was given a gradient of its own after backward, which would be lost: its gradient is shared out "
        "already; let it come from the loss");
  }
}

void ParameterShards::State::finish_all() {
  const at::NoGradGuard no_grad;
  settle_dropped();
  for (Unit& unit : units_) {
    finish(unit);
    round_sum(unit);
    if (unit.has_gradient) add_over_replicas(unit);
    if (!unit.is_trained || unit.has_gradient) continue;
    take_gradient(unit);
    unit.gradient.zero_();
  }
  for (Unit& unit : units_) std::exchange(unit.replication, {}).wait();
  memory_.clear();  // the next forward has a use for it
  forget_pass();
}

// It neither waits nor takes memory, because this rank may be about to leave the others.
void ParameterShards::drop() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  for (State::Unit& unit : state_->units_) {
    unit.sum.reset();
    unit.wide.reset();
    unit.landing.reset();
  }
  state_->landing_buffers_.clear();  // what is under way may still read them
  state_->withheld_.put_back();
  state_->drop_values();
  state_->was_dropped_ = state_->was_dropped_ || state_->has_begun_;
  state_->forget_pass();
}

// Between windows. What is under way may still write to the parts' gradients. A sum that only some ranks have sent
// would be added to one of the next window.
void ParameterShards::State::settle_dropped() {
  if (!was_dropped_) return;
  detail::require_same_sent(*ranks_, "sums", sums_sent_);
  if (replicas_ != nullptr) detail::require_same_sent(*replicas_, "sums over replicas", replications_sent_);
  for (Unit& unit : units_) {
    std::exchange(unit.work, {}).wait();
    std::exchange(unit.replication, {}).wait();
  }
  was_dropped_ = false;
}

void ParameterShards::State::forget_pass() {
  active_ = has_begun_ = false;
  for (Unit& unit : units_) unit.has_gradient = unit.is_replicated = false;
  has_contributed_.assign(parts_.size(), 0);
  was_reached_.assign(parts_.size(), 0);
}

void ParameterShards::gather_parameters() {
  const at::NoGradGuard no_grad;
  Work before;  // two under way, because a transport may need memory for each
  state_->release_all();
  for (const State::Unit& unit : state_->units_) {
    if (state_->keeps_parts_ || !unit.parameters.defined()) continue;
    Work work = state_->ranks_->all_gather(unit.parameters, unit.own_parameters, agreed());
    before.wait();
    before = std::move(work);
  }
  before.wait();
  for (State::Unit& unit : state_->units_) state_->release_gradient(unit);
  for (const Part& part : state_->parts_) part.parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace pacer
