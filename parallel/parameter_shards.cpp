#include <pacer/parallel/parameter_shards.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/parallel/detail/parameter_shards_state.h>

namespace pacer {

ParameterShards::ParameterShards(const std::vector<NamedParameter>& parameters,
                                 std::shared_ptr<Communicator> ranks, const ParameterShardsOptions& options,
                                 std::shared_ptr<Communicator> replicas) {
  require(ranks != nullptr, "ParameterShards needs a Communicator");
  require(options.unit_bytes() >= 1, "ParameterShardsOptions::unit_bytes must be at least 1, not ",
          options.unit_bytes());
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

const std::vector<ParameterShards::Part>& ParameterShards::parts() const { return state_->parts_; }
ShardPiece ParameterShards::piece(size_t i, int rank) const { return state_->piece(i, rank); }
void ParameterShards::begin_backward(const Pass& pass) { state_->begin(pass); }
void ParameterShards::end_backward() { state_->end(); }
void ParameterShards::reduce(const std::vector<at::Tensor>& absent_in_all, bool stays_local) {
  state_->reduce(absent_in_all, stays_local);
}
void ParameterShards::wait() { state_->wait(); }
void ParameterShards::drop() { state_->drop(); }
void ParameterShards::gather_parameters() { state_->gather_parameters(); }
void ParameterShards::keep_parts() { state_->keep_parts(); }
bool ParameterShards::keeps_parts() const { return state_->values_.has_value(); }
void ParameterShards::gather_until_landed(size_t group, size_t passes) {
  state_->gather_until_landed(group, passes);
}
std::string ParameterShards::group_name(size_t group) const { return state_->group_name(group); }
void ParameterShards::gather_all() { state_->gather_all(); }
void ParameterShards::release_all() { state_->release_all(); }
bool ParameterShards::all_are_gathered() const { return state_->may_be_changed_; }
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
