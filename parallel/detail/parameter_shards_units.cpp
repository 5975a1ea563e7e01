// Which parameters travel together, and where they lie.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>

namespace pacer {
namespace {

constexpr int64_t kFirstUnitBytes = 1 << 20;

at::TensorOptions like(const at::Tensor& parameter) { return parameter.options().requires_grad(false); }

}  // namespace

void ParameterShards::State::add(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& item : parameters) {
    detail::check_reducible(item.first, item.second, *ranks_);
    if (item.second.requires_grad() && !positions_.count(item.second.unsafeGetTensorImpl())) add_part(item);
  }
  make_units();
  move_parameters();
  make_parts();
  add_hooks();
}

void ParameterShards::State::add_groups(const std::vector<Group>& groups) {
  group_count_ = groups.size();
  // dtype, whether gradients are needed, and whether they may stay local
  using Kind = std::tuple<at::ScalarType, bool, bool>;
  std::vector<std::map<Kind, std::vector<size_t>>> members(groups.size());
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const NamedParameter& item : groups[group]) {
      detail::check_reducible(item.first, item.second, *ranks_);
      require(!positions_.count(item.second.unsafeGetTensorImpl()), "parameter ", item.first,
              " is given to ParameterShards twice; each belongs to one group");
      const auto& parameter = item.second;
      members[group][{parameter.scalar_type(), parameter.requires_grad(), may_stay_local(parameter)}]
          .push_back(parts_.size());
      add_part(item);
    }
  }
  place_in_unit_.resize(parts_.size());
  for (size_t group = groups.size(); group-- > 0;) {
    for (auto& [kind, of_unit] : members[group]) add_unit(std::move(of_unit), group);
  }
  make_parts();
  add_hooks();
}

void ParameterShards::State::add_part(const NamedParameter& item) {
  const auto& [name, parameter] = item;
  require(parameter.is_contiguous(), "parameter ", name, " of shape ", parameter.sizes(), " and strides ",
          parameter.strides(),
          " is not contiguous, so ranks cannot share it out; give it contiguous memory before the optimizer "
          "is made");
  positions_.emplace(parameter.unsafeGetTensorImpl(), parts_.size());
  Part& part = parts_.emplace_back();
  part.name = name;
  part.parameter = parameter;
  withheld_.add(name, parameter);
  const int replicas = replicas_ ? replicas_->world_size() : 1;
  if (parameter.scalar_type() == at::kHalf) prescale_ = 1.0 / (ranks_->world_size() * replicas);
}

void ParameterShards::State::add_hooks() {
  has_contributed_.assign(parts_.size(), 0);
  was_reached_.assign(parts_.size(), 0);
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!unit_of(i).is_trained) continue;
    detail::add_gradient_hook(parts_[i].parameter, shared_from_this(),
                              [this, i](const at::Tensor&) { land(i); });
  }
}

// Backward finishes the last layers first. The order is never learned: it decides who owns what.
void ParameterShards::State::make_units() {
  std::vector<std::vector<size_t>> members;
  std::map<std::pair<at::ScalarType, bool>, size_t> open;  // the unit that fills
  std::vector<int64_t> bytes;
  for (size_t i = parts_.size(); i-- > 0;) {
    const at::Tensor& parameter = parts_[i].parameter;
    const auto [found, is_new] =
        open.emplace(std::make_pair(parameter.scalar_type(), may_stay_local(parameter)), members.size());
    // The first one to be full is small, so that communication begins early.
    const int64_t limit =
        found->second == 0 ? std::min(kFirstUnitBytes, options_.unit_bytes()) : options_.unit_bytes();
    if (!is_new && bytes[found->second] >= limit) found->second = members.size();
    if (found->second == members.size()) {
      members.emplace_back();
      bytes.push_back(0);
    }
    members[found->second].push_back(i);
    bytes[found->second] += static_cast<int64_t>(parameter.nbytes());
  }
  place_in_unit_.resize(parts_.size());
  for (std::vector<size_t>& of_unit : members) add_unit(std::move(of_unit), 0);
}

bool ParameterShards::State::may_stay_local(const at::Tensor& parameter) const {
  const std::vector<at::Tensor>& local = options_.may_stay_local();
  return std::any_of(local.begin(), local.end(),
                     [&](const at::Tensor& one) { return one.is_same(parameter); });
}

void ParameterShards::State::add_unit(std::vector<size_t> members, size_t group) {
  std::vector<int64_t> counts;
  for (const size_t position : members) {
    gradients_.put(position, units_.size());
    place_in_unit_[position] = counts.size();
    counts.push_back(parts_[position].parameter.numel());
  }
  const at::Tensor& first = parts_[members.front()].parameter;
  Unit unit{std::move(members), group, first.requires_grad(), may_stay_local(first),
            ShardLayout(counts, ranks_->world_size(), options_.piece())};
  if (unit.is_trained) unit.gradient = at::zeros({unit.layout.part_elements()}, like(first));
  units_.push_back(std::move(unit));
}

void ParameterShards::State::move_parameters() {
  for (Unit& unit : units_) {
    unit.parameters = moved_parameters(unit);
    const int64_t part = unit.layout.part_elements();
    unit.own_parameters = unit.parameters.narrow(0, ranks_->rank() * part, part);
  }
}

// Into flat memory. Parameters stay the tensors that they are, for the optimizer's state, the graph and their
// hooks.
at::Tensor ParameterShards::State::moved_parameters(const Unit& unit) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = at::zeros({unit.layout.elements()}, like(parts_[unit.members.front()].parameter));
  for (size_t k = 0; k < unit.members.size(); ++k) {
    at::Tensor& parameter = parts_[unit.members[k]].parameter;
    const at::Tensor place = flat.narrow(0, unit.layout.begin(k), parameter.numel()).view(parameter.sizes());
    place.copy_(parameter);
    parameter.set_data(place);
  }
  return flat;
}

void ParameterShards::State::make_parts() {
  const auto rank = static_cast<size_t>(ranks_->rank());
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    const Unit& unit = unit_of(i);
    part.bounds = unit.layout.bounds(place_in_unit_[i]);
    part.first = part.bounds[rank];
    part.count = part.bounds[rank + 1] - part.first;
    part.group = unit.group;
    if (unit.is_trained) part.gradient = own_piece(i, unit.gradient);
  }
}

// The elements of the parameter among those of this rank's part of its unit.
at::Tensor ParameterShards::State::own_piece(size_t i, const at::Tensor& part) const {
  const int64_t first = parts_[i].first, count = parts_[i].count;
  const ShardLayout& layout = units_[gradients_.bucket_of(i)].layout;
  const int64_t place = layout.begin(place_in_unit_[i]) + first - ranks_->rank() * layout.part_elements();
  return part.narrow(0, count > 0 ? place : 0, count);
}

}  // namespace pacer
