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
  for (const Part& part : state_->parts()) detail::remove_gradient_hook(part.parameter, state_.get());
}

const std::vector<ParameterShards::Part>& ParameterShards::parts() const { return state_->parts(); }
void ParameterShards::begin_backward(const Pass& pass) { state_->begin(pass); }
void ParameterShards::end_backward() { state_->end(); }
std::vector<char> ParameterShards::missed() const { return state_->missed(); }
void ParameterShards::reduce(const std::vector<at::Tensor>& absent_in_all, bool stays_local) {
  state_->reduce(absent_in_all, stays_local);
}
void ParameterShards::wait() { state_->wait(); }
void ParameterShards::drop() { state_->drop(); }
void ParameterShards::gather_parameters() { state_->gather_parameters(); }
void ParameterShards::keep_parts() { state_->keep_parts(); }
bool ParameterShards::keeps_parts() const { return state_->keeps_parts(); }
void ParameterShards::gather(size_t group) { state_->gather(group); }
void ParameterShards::gather_ahead(size_t group, size_t at_most) { state_->gather_ahead(group, at_most); }
void ParameterShards::release(size_t group) { state_->release(group); }
void ParameterShards::gather_until_landed(size_t group, size_t passes) {
  state_->gather_until_landed(group, passes);
}
void ParameterShards::passed(size_t group) { state_->passed(group); }
bool ParameterShards::is_gathered(size_t group) const { return state_->is_gathered(group); }
std::string ParameterShards::group_name(size_t group) const { return state_->group_name(group); }
void ParameterShards::gather_all() { state_->gather_all(); }
void ParameterShards::release_all() { state_->release_all(); }
bool ParameterShards::all_are_gathered() const { return state_->all_are_gathered(); }
std::vector<std::string> ParameterShards::take_history() { return state_->take_history(); }
double ParameterShards::scale() const { return state_->scale(); }
std::vector<std::vector<std::string>> ParameterShards::units() const { return state_->units(); }

}  // namespace pacer
