// Values that come and go: what groups of parameters wait for, and what was sent for them.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <utility>

#include <pacer/core/error.h>

namespace pacer {

void ParameterShards::State::keep_parts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  require(group_count_ > 0, "ParameterShards::keep_parts needs groups of parameters; give them to it");
  if (values_) return;
  values_.emplace(ranks_, group_count_);
  for (Unit& unit : units_) {
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (const size_t position : unit.members) {
      parameters.push_back(parts_[position].parameter);
      names.push_back(parts_[position].name);
    }
    const at::Tensor flat = moved_parameters(unit);
    unit.own_parameters = values_->add(unit.group, std::move(parameters), names, flat);
  }
  make_parts();
}

// Says which group it is about. With the lock.
void ParameterShards::State::gather_values(size_t group) {
  settle_dropped();
  try {
    values_->gather(group);
  } catch (const CommunicationError& error) {
    throw CommunicationError(
        detail::concatenate(error.what(), "; it was to gather ", group_name(group),
                            ", and all ranks must run the same blocks in the same order, in evaluate, too"),
        error.operation(), error.sequence(), error.step(), error.suspected_ranks());
  }
}

void ParameterShards::gather(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->values_) state_->gather_values(group);
}

void ParameterShards::gather_ahead(size_t group, size_t at_most) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (!state_->values_ || state_->values_->ahead() >= at_most) return;
  state_->settle_dropped();
  state_->values_->start(group);
}

void ParameterShards::release(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->values_) state_->values_->release(group);
}

void ParameterShards::State::gather_until_landed(size_t group, size_t passes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!values_) return;
  size_t landings = 0;
  for (const Unit& unit : units_) {
    if (unit.group != group || !unit.is_trained) continue;
    for (const size_t position : unit.members) {
      landings += !active_ || gradients_.is_awaited(position);
    }
  }
  gather_values(group);
  values_->keep_until(group, landings, passes);
}

void ParameterShards::passed(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->values_ && state_->values_->passed(group) && !state_->keeps_gathered())
    state_->values_->release(group);
}

// A parameter that got its gradient is not read any more in this backward.
void ParameterShards::State::count_landed(size_t position) {
  const size_t group = unit_of(position).group;
  if (values_ && values_->landed(group) && !keeps_gathered()) values_->release(group);
}

bool ParameterShards::is_gathered(size_t group) const {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  return !state_->values_ || state_->values_->is_gathered(group);
}

void ParameterShards::State::gather_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!values_) return;
  try {
    for (size_t group = 0; group < group_count_; ++group) gather_values(group);
  } catch (...) {  // memory was short, or a rank has left
    values_->drop();
    throw;
  }
  may_be_changed_ = true;
}

void ParameterShards::State::release_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!values_) return;
  if (!std::exchange(may_be_changed_, false)) return values_->release_all();
  for (size_t group = 0; group < group_count_; ++group) values_->write_back(group);
  values_->release_all();
  values_->forget_memory();  // of the whole model, which a step does not need
}

void ParameterShards::State::note_gathers() {
  for (const size_t group : values_->take_started()) history_.push_back("gathers " + group_name(group));
}

std::string ParameterShards::State::group_name(size_t group) const {
  for (const Unit& unit : units_) {
    if (unit.group == group) return "the parameters with " + parts_[unit.members.front()].name;
  }
  return "no parameters";
}

void ParameterShards::State::note_sum(const Unit& unit) {
  if (!values_) return;
  note_gathers();
  history_.push_back(detail::concatenate("adds gradients of ", group_name(unit.group)));
}

std::vector<std::string> ParameterShards::take_history() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (state_->values_) state_->note_gathers();
  return std::exchange(state_->history_, {});
}

}  // namespace pacer
