#include <pacer/sharding/parameter_shards.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>
#include <pacer/sharding/detail/parameter_shards_state.h>

namespace pacer {

ParameterShards::ParameterShards(const std::vector<NamedParameter>& parameters,
                                 std::shared_ptr<Communicator> ranks, const ParameterShardsOptions& options) {
  require(ranks != nullptr, "ParameterShards needs a Communicator");
  require(options.unit_bytes() >= 1, "ParameterShardsOptions::unit_bytes must be at least 1, not ",
          options.unit_bytes());
  state_ = std::make_shared<State>(std::move(ranks), options);
  state_->add(parameters);
}

ParameterShards::~ParameterShards() {
  for (const Part& part : state_->parts()) detail::remove_gradient_hook(part.parameter, state_.get());
}

const std::vector<ParameterShards::Part>& ParameterShards::parts() const { return state_->parts(); }
ShardPiece ParameterShards::piece(size_t i, int rank) const { return state_->piece(i, rank); }
void ParameterShards::begin_backward(const Pass& pass) { state_->begin(pass); }
void ParameterShards::end_backward() { state_->end(); }
void ParameterShards::reduce(const std::vector<at::Tensor>& absent_in_all) { state_->reduce(absent_in_all); }
void ParameterShards::wait() { state_->wait(); }
void ParameterShards::drop() { state_->drop(); }
void ParameterShards::gather_parameters() { state_->gather_parameters(); }
double ParameterShards::scale() const { return state_->scale(); }
std::vector<std::vector<std::string>> ParameterShards::units() const { return state_->units(); }

}  // namespace pacer
