// Memory that comes and goes: where the gradients of a unit come together and travel, and the values of groups of
// which each rank keeps its part.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/record_stream.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pacer/core/error.h>

namespace pacer {

// Activations are in the same memory while there is no sum.
void ParameterShards::State::take_gradient(Unit& unit) {
  if (unit.has_memory()) return;
  set_gradient_memory(unit, at::empty(unit.gradient.sizes(), unit.gradient.options()).storage());
}

void ParameterShards::State::release_gradient(Unit& unit) {
  if (!unit.is_trained || !unit.has_memory()) return;
  const at::Device device = unit.gradient.device();
  // The update may have run on another stream than backward.
  if (device.is_cuda()) unit.gradient.record_stream(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device));
  set_gradient_memory(unit, unit.no_memory);
}

// The tensors stay the same: the optimizer has them.
void ParameterShards::State::set_gradient_memory(const Unit& unit, const c10::Storage& memory) {
  unit.gradient.unsafeGetTensorImpl()->set_storage_keep_dtype(memory);
  for (const size_t position : unit.members) {
    const at::Tensor& part = parts_[position].gradient;
    if (part.defined()) part.unsafeGetTensorImpl()->set_storage_keep_dtype(memory);
  }
}

// Padding travels, too; whatever stands there reaches nobody's piece.
void ParameterShards::State::make_landing(Unit& unit) {
  if (unit.landing.defined()) return;
  if (!options_.reduce_every_backward()) {
    at::TensorOptions kind = unit.gradient.options();
    if (adds_up_wide(unit) && !pass_.is_last) kind = kind.dtype(at::kFloat);
    unit.landing = at::zeros({unit.layout.elements()}, kind);
  } else {
    unit.landing = !groups_.empty() ? take_memory(unit) : take_landing_buffer(unit);
  }
}

// Two buffers are enough where units fill one after the other.
at::Tensor ParameterShards::State::take_landing_buffer(Unit& unit) {
  constexpr size_t kBuffers = 2;
  const auto dtype = unit.gradient.scalar_type();
  LandingBuffer* free = nullptr;
  size_t of_dtype = 0;
  for (LandingBuffer& buffer : landing_buffers_) {
    if (buffer.memory.scalar_type() != dtype) continue;
    ++of_dtype;
    if (buffer.user != nullptr && buffer.user->work.is_empty()) continue;  // it fills
    if (free == nullptr || buffer.user == nullptr) free = &buffer;
  }
  if (of_dtype < kBuffers && (free == nullptr || free->user != nullptr)) free = nullptr;
  if (free == nullptr) {
    int64_t elements = 0;
    for (const Unit& other : units_) {
      if (!other.is_trained || other.gradient.scalar_type() != dtype) continue;
      elements = std::max(elements, other.layout.elements());
    }
    landing_buffers_.push_back({at::zeros({elements}, unit.gradient.options()), nullptr});
    free = &landing_buffers_.back();
  }
  if (free->user != nullptr) finish(*free->user);
  free->user = &unit;
  return free->memory.narrow(0, 0, unit.layout.elements());
}

// One sum under way beside those that fill.
at::Tensor ParameterShards::State::take_memory(const Unit& unit) {
  for (Unit& other : units_) {
    if (!other.work.is_empty() && &other != newest_sent_) finish(other);
  }
  return memory_.take(unit.layout.elements(), unit.gradient);
}

// Values that were asked for ahead of their use; the gather then only waits for them.
void ParameterShards::State::start_gather(size_t number) {
  GatheredGroup& group = groups_[number];
  if (group.is_started || group.is_gathered) return;
  const at::NoGradGuard no_grad;
  for (const size_t u : group.units) {
    units_[u].parameters = values_memory_.take(units_[u].layout.elements(), units_[u].own_parameters);
  }
  group.is_started = true;  // memory was not short
  if (!group.units.empty()) history_.push_back({Operation::Kind::gather, number});
  for (const size_t u : group.units) {
    Unit& unit = units_[u];
    unit.gathering =
        ranks_->all_gather(unit.parameters, unit.own_parameters, CollectiveOptions().agreed(true));
  }
}

// Returns when the values are there; on CUDA the current stream waits.
void ParameterShards::State::finish_gather(size_t number) {
  GatheredGroup& group = groups_[number];
  if (group.is_gathered) return;
  start_gather(number);
  for (const size_t u : group.units) {
    Unit& unit = units_[u];
    std::exchange(unit.gathering, {}).wait();  // it holds its tensors
    unit.memory->attach(unit.parameters);
  }
  group.is_started = false;
  group.is_gathered = true;
}

// Says which group it is about.
void ParameterShards::State::gather(size_t group) {
  settle_dropped();
  try {
    finish_gather(group);
  } catch (const CommunicationError& error) {
    throw CommunicationError(
        detail::concatenate(error.what(), "; it was to gather ", group_name(group),
                            ", and all ranks must run the same blocks in the same order, in evaluate, too"),
        error.operation(), error.sequence(), error.step(), error.suspected_ranks());
  }
}

void ParameterShards::State::release(size_t number) {
  GatheredGroup& group = groups_[number];
  group.landings = group.passes = 0;
  if (group.is_started) finish_gather(number);
  if (!std::exchange(group.is_gathered, false)) return;
  for (const size_t u : group.units) {
    units_[u].memory->release();
    values_memory_.give_back(std::exchange(units_[u].parameters, at::Tensor()));
  }
}

void ParameterShards::State::release_all() {
  if (!keeps_parts_) return;
  for (size_t group = 0; group < groups_.size(); ++group) release(group);
}

// The same where operations have failed: what is under way is not waited for.
void ParameterShards::State::drop_values() {
  if (!keeps_parts_) return;
  for (Unit& unit : units_) {
    unit.gathering = {};
    unit.memory->release();
    unit.parameters.reset();  // what is under way may still write to it
  }
  for (GatheredGroup& group : groups_) group = {std::move(group.units)};
  values_memory_.clear();
}

void ParameterShards::gather(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->keeps_parts_) state_->gather(group);
}

void ParameterShards::gather_ahead(size_t group, size_t at_most) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  const auto is_started = [](const State::GatheredGroup& other) { return other.is_started; };
  const auto ahead = std::count_if(state_->groups_.begin(), state_->groups_.end(), is_started);
  if (!state_->keeps_parts_ || static_cast<size_t>(ahead) >= at_most) return;
  state_->settle_dropped();
  state_->start_gather(group);
}

void ParameterShards::release(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->keeps_parts_) state_->release(group);
}

void ParameterShards::gather_until_landed(size_t number, size_t passes) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (!state_->keeps_parts_) return;
  State::GatheredGroup& group = state_->groups_[number];
  size_t landings = 0;
  for (const size_t u : group.units) {
    if (!state_->units_[u].is_trained) continue;
    for (const size_t position : state_->units_[u].members) {
      landings += !state_->active_ || state_->gradients_.is_awaited(position);
    }
  }
  state_->gather(number);
  group.landings = std::max(group.landings, landings);  // a gradient lands once, however often it is used
  group.passes += passes;
}

void ParameterShards::passed(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->keeps_parts_) state_->count(group, state_->groups_[group].passes);
}

// A backward pass through the group waits for one less. Behind the last one nobody reads its values.
void ParameterShards::State::count(size_t number, size_t& awaited) {
  if (awaited == 0) return;
  --awaited;
  const GatheredGroup& group = groups_[number];
  if (group.landings == 0 && group.passes == 0 && !keeps_gathered()) release(number);
}

bool ParameterShards::is_gathered(size_t group) const {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  return !state_->keeps_parts_ || state_->groups_[group].is_gathered;
}

void ParameterShards::gather_all() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (!state_->keeps_parts_) return;
  try {
    for (size_t group = 0; group < state_->groups_.size(); ++group) state_->gather(group);
  } catch (...) {  // memory was short, or a rank has left
    state_->drop_values();
    throw;
  }
  state_->may_be_changed_ = true;
}

bool ParameterShards::all_are_gathered() const { return state_->may_be_changed_; }

void ParameterShards::release_all() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  const bool was_changed = std::exchange(state_->may_be_changed_, false);
  if (was_changed) {  // this rank's part is what stands there now
    const at::NoGradGuard no_grad;
    for (const State::Unit& unit : state_->units_) {
      const int64_t part = unit.layout.part_elements();
      unit.own_parameters.copy_(unit.parameters.narrow(0, state_->ranks_->rank() * part, part));
    }
  }
  state_->release_all();
  if (was_changed) state_->values_memory_.clear();  // that of the whole model, which a step does not need
}

std::string ParameterShards::State::group_name(size_t group) const {
  const std::vector<size_t>& units = groups_[group].units;
  return units.empty() ? "no parameters"
                       : "the parameters with " + parts_[units_[units.front()].members.front()].name;
}

std::string ParameterShards::group_name(size_t group) const { return state_->group_name(group); }

std::string ParameterShards::describe(const Operation& operation) const {
  const bool gathers = operation.kind == Operation::Kind::gather;
  return (gathers ? "gathers " : "adds gradients of ") + group_name(operation.group);
}

std::vector<ParameterShards::Operation> ParameterShards::take_history() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  return std::exchange(state_->history_, {});
}

}  // namespace pacer
