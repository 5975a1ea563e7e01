// Which parameters travel together, and where they lie: what a ParameterShards is made with, and tells of it.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/refusing_storage.h>
#include <pacer/modules/deferred.h>

namespace pacer {
namespace {

constexpr int64_t kFirstUnitBytes = 1 << 20;

at::TensorOptions like(const at::Tensor& parameter) { return parameter.options().requires_grad(false); }

}  // namespace

ParameterShards::ParameterShards(const std::vector<NamedParameter>& parameters,
                                 std::shared_ptr<Communicator> ranks, const ParameterShardsOptions& options,
                                 std::shared_ptr<Communicator> replicas) {
  require(ranks != nullptr, "ParameterShards needs a Communicator");
  require(options.unit_bytes() >= 1, "ParameterShardsOptions::unit_bytes must be at least 1, not ",
          options.unit_bytes());
  require(options.split_by_rows().empty(),
          "ParameterShardsOptions::split_by_rows is for groups of parameters; give ParameterShards groups, "
          "or leave it out");
  state_ = std::make_shared<State>(std::move(ranks), std::move(replicas), options);
  state_->add(parameters);
}

ParameterShards::ParameterShards(const std::vector<Group>& groups, std::shared_ptr<Communicator> ranks,
                                 const ParameterShardsOptions& options,
                                 std::shared_ptr<Communicator> replicas) {
  require(ranks != nullptr, "ParameterShards needs a Communicator");
  state_ = std::make_shared<State>(std::move(ranks), std::move(replicas), options);
  state_->add_groups(groups);
}

ParameterShards::~ParameterShards() {
  for (const Part& part : state_->parts_) detail::remove_gradient_hook(part.parameter, state_.get());
}

void ParameterShards::State::add(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& item : parameters) {
    detail::check_reducible(item.first, item.second, *ranks_);
    require(!is_deferred(item.second), "parameter ", item.first,
            " has no values, because defer_initialization took its memory; ParameterShards gives memory to "
            "groups "
            "of parameters only");
    if (item.second.requires_grad() && !positions_.count(item.second.unsafeGetTensorImpl())) add_part(item);
  }
  make_units();
  move_parameters();
  make_parts();
  add_hooks();
}

void ParameterShards::State::add_groups(const std::vector<Group>& groups) {
  groups_.resize(groups.size());
  check_split(groups);
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

bool ParameterShards::State::contains(const std::vector<at::Tensor>& all, const at::Tensor& parameter) {
  return std::any_of(all.begin(), all.end(), [&](const at::Tensor& one) { return one.is_same(parameter); });
}

bool ParameterShards::State::may_stay_local(const at::Tensor& parameter) const {
  return contains(options_.may_stay_local(), parameter);
}

void ParameterShards::State::add_unit(std::vector<size_t> members, size_t group) {
  std::vector<int64_t> counts;
  for (const size_t position : members) {
    gradients_.put(position, units_.size());
    place_in_unit_[position] = counts.size();
    counts.push_back(parts_[position].parameter.numel());
  }
  const at::Tensor& first = parts_[members.front()].parameter;
  Unit unit{std::move(members),      group,
            first.requires_grad(),   may_stay_local(first),
            is_split_by_rows(first), ShardLayout(counts, ranks_->world_size(), piece_of(first))};
  if (unit.is_trained) {
    unit.gradient = at::empty({unit.layout.part_elements()}, like(first));
    unit.no_memory = detail::refusing_storage(
        unit.gradient.nbytes(), unit.gradient.device(),
        "gradients of which ranks have parts are here from the end of backward to the end of the step");
    set_gradient_memory(unit, unit.no_memory);
  }
  if (!groups_.empty()) groups_[group].units.push_back(units_.size());
  units_.push_back(std::move(unit));
}

void ParameterShards::State::move_parameters() {
  for (Unit& unit : units_) {
    unit.parameters = moved_parameters(unit);
    const int64_t part = unit.layout.part_elements();
    unit.own_parameters = unit.parameters.narrow(0, ranks_->rank() * part, part);
  }
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

// What left the flat memory would neither be updated nor reach other ranks.
void ParameterShards::State::require_in_place() const {
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t k = 0; k < units_[u].members.size(); ++k) {
      detail::require_in_place(is_in_place(u, k), parts_[units_[u].members[k]].name);
    }
  }
}

bool ParameterShards::State::is_in_place(size_t u, size_t member) const {
  const Unit& unit = units_[u];
  const at::Tensor& parameter = parts_[unit.members[member]].parameter;
  if (unit.memory) return unit.memory->holds(member);
  if (!unit.parameters.defined() || parameter.numel() == 0) return true;
  const auto size = static_cast<int64_t>(unit.parameters.element_size());
  return parameter.const_data_ptr() ==
         static_cast<const char*>(unit.parameters.const_data_ptr()) + unit.layout.begin(member) * size;
}

void ParameterShards::State::set_absent(const std::vector<at::Tensor>& parameters,
                                        std::vector<char>& marks) const {
  marks.assign(parts_.size(), 0);
  for (const at::Tensor& parameter : parameters) {
    const auto found = positions_.find(parameter.unsafeGetTensorImpl());
    if (found != positions_.end()) marks[found->second] = 1;
  }
}

const std::vector<ParameterShards::Part>& ParameterShards::parts() const { return state_->parts_; }
double ParameterShards::scale() const { return state_->prescale_; }

std::vector<char> ParameterShards::missed() const {
  std::vector<char> missed;
  for (size_t i = 0; i < state_->parts_.size(); ++i) {
    missed.push_back(state_->unit_of(i).is_trained && state_->was_reached_[i] == 0 ? 1 : 0);
  }
  return missed;
}

std::vector<std::vector<std::string>> ParameterShards::units() const {
  std::vector<std::vector<std::string>> names;
  for (const State::Unit& unit : state_->units_) {
    names.emplace_back();
    for (const size_t position : unit.members) names.back().push_back(state_->parts_[position].name);
  }
  return names;
}

}  // namespace pacer
