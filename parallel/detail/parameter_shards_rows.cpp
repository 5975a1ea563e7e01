// Matrices of which each rank has whole rows, and makes the gradient of these itself.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <pacer/core/error.h>

namespace pacer {

bool ParameterShards::State::is_split_by_rows(const at::Tensor& parameter) const {
  return contains(options_.split_by_rows(), parameter);
}

void ParameterShards::State::check_split(const std::vector<Group>& groups) const {
  size_t found = 0;
  for (const Group& group : groups) {
    const bool has_split = std::any_of(group.begin(), group.end(), [&](const NamedParameter& item) {
      return is_split_by_rows(item.second);
    });
    found += has_split ? 1 : 0;
    require(
        !has_split || (group.size() == 1 && group.front().second.dim() == 2),
        "ParameterShardsOptions::split_by_rows is for matrices, each alone in its group, and the group with ",
        group.empty() ? "" : group.front().first, " is none");
  }
  require(found == options_.split_by_rows().size(), "ParameterShardsOptions::split_by_rows has ",
          options_.split_by_rows().size(), " matrices, of which ", found,
          " are in the groups; give each a group");
}

// See ShardLayout.
int64_t ParameterShards::State::piece_of(const at::Tensor& parameter) const {
  constexpr int64_t kRows = 16, kPlaces = 128;  // multiples of rows and of the layout's places
  if (!is_split_by_rows(parameter)) return options_.piece();
  const int64_t rows = std::lcm(kRows * std::max<int64_t>(parameter.size(1), 1), kPlaces);
  return std::lcm(rows, options_.piece());
}

// Autograd comes by with nothing for what is in the graph without a gradient.
void ParameterShards::State::require_no_gradient(const Part& part) {
  require(!part.parameter.grad().defined(), "parameter ", part.name,
          " received a gradient of its own, but ranks share it out by rows; use it only in what computes "
          "with parts of "
          "it, as WithHead::head_loss does");
}

// Of a matrix that is split by rows.
void ParameterShards::State::add_part_gradient(size_t position, const at::Tensor& gradient) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Unit& unit = unit_of(position);
  require(
      active_, "parameter ", parts_[position].name,
      ", which ranks share out by rows, received a gradient outside of a backward pass of its Session; call "
      "Session::backward");
  const at::NoGradGuard no_grad;
  take_gradient(unit);
  // What stands in padding reaches nobody's piece.
  const at::Tensor sum = unit.has_gradient ? at::empty_like(unit.gradient) : unit.gradient;
  at::Tensor place = own_piece(position, sum);
  place.copy_(gradient.reshape({-1}));
  if (prescale_ != 1) place.mul_(at::scalar_tensor(prescale_, at::kFloat));
  if (unit.has_gradient) {
    unit.sum = sum;
    add_sum(unit);
    unit.sum.reset();
  }
  unit.has_gradient = true;
  gradients_.arrive(position);
  was_reached_[position] = 1;
  send_full_units();
}

void ParameterShards::add_part_gradient(size_t part, const at::Tensor& gradient) {
  state_->add_part_gradient(part, gradient);
}

}  // namespace pacer
