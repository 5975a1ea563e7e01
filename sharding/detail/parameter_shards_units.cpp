// Which parameters travel together, and where they lie.
#include <pacer/sharding/detail/parameter_shards_state.h>

#include <algorithm>
#include <map>
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
  for (const auto& [name, parameter] : parameters) {
    detail::check_reducible(name, parameter, *ranks_);
    if (!parameter.requires_grad() || positions_.count(parameter.unsafeGetTensorImpl())) continue;
    require(
        parameter.is_contiguous(), "parameter ", name, " of shape ", parameter.sizes(), " and strides ",
        parameter.strides(),
        " is not contiguous, so ranks cannot share it out; give it contiguous memory before the optimizer "
        "is made");
    positions_.emplace(parameter.unsafeGetTensorImpl(), parts_.size());
    parts_.push_back({name, parameter, 0, 0, {}});
    if (parameter.scalar_type() == at::kHalf) prescale_ = 1.0 / ranks_->world_size();
  }
  make_units();
  move_parameters();
  make_parts();
  has_contributed_.assign(parts_.size(), 0);
  for (size_t i = 0; i < parts_.size(); ++i) {
    detail::add_gradient_hook(parts_[i].parameter, shared_from_this(),
                              [this, i](const at::Tensor&) { land(i); });
  }
}

// Backward finishes the last layers first. The order is never learned: it decides who owns what.
void ParameterShards::State::make_units() {
  std::vector<std::vector<size_t>> members;
  std::map<at::ScalarType, size_t> open;  // the unit that fills
  std::vector<int64_t> bytes;
  for (size_t i = parts_.size(); i-- > 0;) {
    const at::Tensor& parameter = parts_[i].parameter;
    const auto [found, is_new] = open.emplace(parameter.scalar_type(), members.size());
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
  unit_of_.resize(parts_.size());
  place_in_unit_.resize(parts_.size());
  for (const std::vector<size_t>& of_unit : members) {
    std::vector<int64_t> counts;
    for (const size_t position : of_unit) {
      unit_of_[position] = units_.size();
      place_in_unit_[position] = counts.size();
      counts.push_back(parts_[position].parameter.numel());
    }
    Unit unit{of_unit, ShardLayout(counts, ranks_->world_size()), {}, {}, {}, false, {}, 0, {}, {}};
    units_.push_back(std::move(unit));
  }
}

// Parameters stay the tensors that they are, for the optimizer's state, the graph and their hooks.
void ParameterShards::State::move_parameters() {
  const at::NoGradGuard no_grad;
  for (Unit& unit : units_) {
    const at::Tensor& first = parts_[unit.members.front()].parameter;
    unit.parameters = at::zeros({unit.layout.elements()}, like(first));
    const int64_t part = unit.layout.part_elements();
    unit.own_parameters = unit.parameters.narrow(0, ranks_->rank() * part, part);
    unit.gradient = at::zeros({part}, like(first));
    for (size_t k = 0; k < unit.members.size(); ++k) {
      at::Tensor& parameter = parts_[unit.members[k]].parameter;
      const at::Tensor place =
          unit.parameters.narrow(0, unit.layout.begin(k), parameter.numel()).view(parameter.sizes());
      place.copy_(parameter);
      parameter.set_data(place);
    }
  }
}

void ParameterShards::State::make_parts() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const ShardPiece own = piece(i, ranks_->rank());
    parts_[i].first = own.first;
    parts_[i].count = own.count;
    parts_[i].gradient = unit_of(i).gradient.narrow(0, own.offset, own.count);
  }
}

ShardPiece ParameterShards::State::piece(size_t i, int rank) const {
  return units_[unit_of_[i]].layout.piece(place_in_unit_[i], rank);
}

std::vector<std::vector<std::string>> ParameterShards::State::units() const {
  std::vector<std::vector<std::string>> names;
  for (const Unit& unit : units_) {
    names.emplace_back();
    for (const size_t position : unit.members) names.back().push_back(parts_[position].name);
  }
  return names;
}

}  // namespace pacer
