// How ranks come to keep parts of the values: of parameters that have them, and of those that get memory only now.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/modules/deferred.h>

namespace pacer {

void ParameterShards::keep_parts() {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(!state_->groups_.empty(),
          "ParameterShards::keep_parts needs groups of parameters; give them to it");
  if (state_->keeps_parts_) return;
  for (size_t group = 0; group < state_->groups_.size(); ++group) {
    require(!state_->has_deferred(group), "ParameterShards::keep_parts for ", state_->group_name(group),
            ", which have no memory; call give_memory for the group and write values there");
  }
  for (size_t group = 0; group < state_->groups_.size(); ++group) state_->keep_part(group);
  state_->keeps_parts_ = true;
}

bool ParameterShards::keeps_parts() const { return state_->keeps_parts_; }

void ParameterShards::give_memory(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  if (!state_->has_deferred(group)) return;
  for (const size_t u : state_->groups_[group].units) state_->give_memory(state_->units_[u]);
}

void ParameterShards::keep_part(size_t group) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(!state_->has_deferred(group), "ParameterShards::keep_part for ", state_->group_name(group),
          ", which have no memory; call give_memory for the group and write values there");
  state_->keep_part(group);
}

bool ParameterShards::State::has_deferred(size_t group) const {
  const std::vector<size_t>& units = groups_[group].units;
  return std::any_of(units.begin(), units.end(), [&](size_t u) {
    const std::vector<size_t>& members = units_[u].members;
    return std::any_of(members.begin(), members.end(),
                       [&](size_t position) { return is_deferred(parts_[position].parameter); });
  });
}

// Of the whole unit at once, so that its part can be kept without another copy of it.
void ParameterShards::State::give_memory(Unit& unit) { unit.parameters = moved_parameters(unit); }

void ParameterShards::State::keep_part(size_t group) {
  for (const size_t u : groups_[group].units) {
    if (!units_[u].memory) keep_part(units_[u]);
  }
}

void ParameterShards::State::keep_part(Unit& unit) {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  for (const size_t position : unit.members) {
    parameters.push_back(parts_[position].parameter);
    names.push_back(parts_[position].name);
  }
  const at::Tensor flat = moved_parameters(unit);
  unit.parameters.reset();
  const int64_t part = unit.layout.part_elements();
  unit.own_parameters = flat.narrow(0, ranks_->rank() * part, part).clone();
  unit.memory.emplace(std::move(parameters), std::move(names), flat);
  for (const size_t position : unit.members) {
    parts_[position].values = own_piece(position, unit.own_parameters);
  }
}

// Into flat memory, that of give_memory() where there is some. Parameters stay the tensors that they are, for the optimizer's
// state, the graph and their hooks.
at::Tensor ParameterShards::State::moved_parameters(const Unit& unit) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat =
      unit.parameters.defined()
          ? unit.parameters
          : at::zeros({unit.layout.elements()},
                      parts_[unit.members.front()].parameter.options().requires_grad(false));
  for (size_t k = 0; k < unit.members.size(); ++k) {
    at::Tensor& parameter = parts_[unit.members[k]].parameter;
    const at::Tensor place = flat.narrow(0, unit.layout.begin(k), parameter.numel()).view(parameter.sizes());
    const bool is_there = parameter.storage().unsafeGetStorageImpl() == flat.storage().unsafeGetStorageImpl();
    if (is_there) continue;
    if (!is_deferred(parameter)) place.copy_(parameter);
    parameter.set_data(place);
  }
  return flat;
}

}  // namespace pacer
