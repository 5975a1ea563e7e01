#include <pacer/parallel/detail/grouped_values.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

namespace pacer::detail {

at::Tensor GroupedValues::add(size_t group, std::vector<at::Tensor> parameters,
                              const std::vector<std::string>& names, const at::Tensor& flat) {
  const int64_t part = flat.numel() / ranks_->world_size();
  at::Tensor own = flat.narrow(0, ranks_->rank() * part, part).clone();
  groups_[group].units.push_back(units_.size());
  units_.push_back({own, flat.numel(), UnitMemory(std::move(parameters), names, flat), {}, {}});
  return own;
}

void GroupedValues::start(size_t group) {
  Group& of = groups_[group];
  if (of.is_started || of.is_gathered) return;
  const at::NoGradGuard no_grad;
  for (const size_t u : of.units) units_[u].whole = memory_.take(units_[u].elements, units_[u].own);
  of.is_started = true;  // memory was not short
  started_.push_back(group);
  for (const size_t u : of.units) {
    Unit& unit = units_[u];
    unit.work = ranks_->all_gather(unit.whole, unit.own, CollectiveOptions().agreed(true));
  }
}

void GroupedValues::gather(size_t group) {
  Group& of = groups_[group];
  if (of.is_gathered) return;
  start(group);
  for (const size_t u : of.units) {
    Unit& unit = units_[u];
    std::exchange(unit.work, {}).wait();  // it holds its tensors
    unit.memory.attach(unit.whole);
  }
  of.is_started = false;
  of.is_gathered = true;
}

void GroupedValues::release(size_t group) {
  Group& of = groups_[group];
  of.landings = of.passes = 0;
  if (of.is_started) gather(group);
  if (!of.is_gathered) return;
  of.is_gathered = false;
  for (const size_t u : of.units) {
    Unit& unit = units_[u];
    unit.memory.release();
    memory_.give_back(std::exchange(unit.whole, at::Tensor()));
  }
}

void GroupedValues::release_all() {
  for (size_t group = 0; group < groups_.size(); ++group) release(group);
}

void GroupedValues::drop() {
  for (Unit& unit : units_) {
    unit.work = {};
    unit.memory.release();
    unit.whole.reset();  // what is under way may still write to it
  }
  for (Group& group : groups_) group = {std::move(group.units)};
  memory_.clear();
}

size_t GroupedValues::ahead() const {
  return static_cast<size_t>(
      std::count_if(groups_.begin(), groups_.end(), [](const Group& group) { return group.is_started; }));
}

void GroupedValues::write_back(size_t group) {
  const at::NoGradGuard no_grad;
  for (const size_t u : groups_[group].units) {
    const Unit& unit = units_[u];
    unit.own.copy_(unit.whole.narrow(0, ranks_->rank() * unit.own.numel(), unit.own.numel()));
  }
}

void GroupedValues::keep_until(size_t group, size_t landings, size_t passes) {
  Group& of = groups_[group];
  of.landings = std::max(of.landings, landings);  // a gradient lands once, however often the group is used
  of.passes += passes;
}

bool GroupedValues::counted(size_t group, size_t& count) {
  if (count == 0) return false;
  --count;
  return groups_[group].landings == 0 && groups_[group].passes == 0;
}

}  // namespace pacer::detail
