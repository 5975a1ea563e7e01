#include <pacer/schedulers/shards.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/model_facts.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer {
namespace {

constexpr int64_t kGatheredBytes = int64_t{64} << 20;  // at once, of a state on its way to who writes it

}  // namespace

std::string Shards::agreement() const {
  return detail::concatenate("parts of ", options_.what() == Sharded::state ? "state" : "state and gradients",
                             ", units of ", options_.unit_bytes(), " bytes, unused parameters ",
                             options_.unused_is_zero() ? "are zero" : "are an error");
}

void Shards::attach(SessionParts& parts) {
  const SessionOptimizer* optimizer = parts.session_optimizer();
  const std::string reason = optimizer ? optimizer->unshared_reason() : "it updates whole parameters";
  require(reason.empty(), "Shards cannot share out the work of this optimizer, because ", reason,
          "; use pacer::FusedAdam or FusedAdamW, or DataParallel in place of Shards");
  JoinedRanks::attach(parts);
}

void Shards::arrange() {
  if (parts().world().world_size() == 1) return;
  require(!parts().replay_optimizer,
          "Shards and CudaGraph do not go together: ranks exchange norms inside the captured step; leave "
          "CudaGraph out");
  ParameterShardsOptions options;
  options.unit_bytes(options_.unit_bytes()).unused_is_zero(options_.unused_is_zero());
  options.reduce_every_backward(options_.what() == Sharded::gradients);
  shards_ = std::make_unique<ParameterShards>(detail::named_optimizer_parameters(parts()),
                                              parts().shared_world(), options);
  std::vector<OwnedPart> owned;
  for (const ParameterShards::Part& part : shards_->parts()) {
    owned.push_back({part.parameter, part.first, part.count, part.gradient});
  }
  parts().session_optimizer()->own_parts(owned, parts().shared_world());
  parts().gradients_are_shared_out = true;
}

void Shards::join() {
  std::vector<at::Tensor> shared_out;
  for (const ParameterShards::Part& part : shards_->parts()) shared_out.push_back(part.parameter);
  require(
      detail::same_tensors(shared_out, detail::trained_parameters(parts())),
      "parameters were frozen, unfrozen or added after Shards had shared them out; do so before the first "
      "begin or resume, or save a checkpoint and resume from it in a new Session");
  is_joined_ = true;
}

void Shards::begin_pass(const Progress& progress, bool is_last) {
  ParameterShards::Pass pass;
  pass.is_last = is_last;
  Progress window = progress, this_one = progress;
  window.micro_step = 0;
  this_one.micro_steps = progress.micro_step + 1;
  pass.absent = parts().unused(this_one);
  if (is_last) pass.absent_in_all = parts().unused(window);
  shards_->begin_backward(pass);
}

void Shards::end_pass(bool /*is_last*/) { shards_->end_backward(); }

void Shards::reduce(const Progress& window) { shards_->reduce(parts().unused(window)); }

// Before anything of the step's new values is read: validation, checkpoints.
void Shards::after_step(StepReport& report) {
  if (is_joined_) shards_->gather_parameters();
  JoinedRanks::after_step(report);
}

std::vector<Shards::SharedTensor> Shards::shared_tensors(const NamedTensors& state) const {
  std::vector<SharedTensor> shared;
  if (!shards_) return shared;
  for (size_t i = 0; i < shards_->parts().size(); ++i) {
    const std::string prefix =
        parts().session_optimizer()->parameter_name(shards_->parts()[i].parameter) + "/";
    for (auto item = state.lower_bound(prefix);
         item != state.end() && item->first.compare(0, prefix.size(), prefix) == 0; ++item) {
      if (item->second.dim() == 1) shared.push_back({item->first, i});
    }
  }
  return shared;
}

NamedTensors Shards::whole_outline(NamedTensors state) const {
  for (const SharedTensor& shared : shared_tensors(state)) {
    at::Tensor& tensor = state.at(shared.name);
    const at::Tensor& parameter = shards_->parts()[shared.part].parameter;
    tensor = at::empty(parameter.sizes(), tensor.options().device(at::kMeta));
  }
  return state;
}

NamedTensors Shards::gather_state(NamedTensors state, const StateOwner& owner) const {
  const at::NoGradGuard no_grad;
  std::vector<Message> messages;
  std::vector<std::string> mine;  // among those under way
  int64_t bytes = 0;
  const auto complete = [&] {
    parts().world().send_receive(std::exchange(messages, {})).wait();
    for (const std::string& name : mine) state.at(name) = state.at(name).cpu();
    mine.clear();
    bytes = 0;
  };
  for (const SharedTensor& shared : shared_tensors(state)) {
    const int to = owner(shared.name);
    at::Tensor& tensor = state.at(shared.name);
    bytes += collect(shared, to, tensor, messages);
    if (to == parts().world().rank()) mine.push_back(shared.name);
    if (bytes >= kGatheredBytes) complete();
  }
  complete();
  return state;
}

// `tensor`, this rank's piece, becomes the whole one where it goes to, once the messages have come. Returns
// the bytes of the whole one.
int64_t Shards::collect(const SharedTensor& shared, int to, at::Tensor& tensor,
                        std::vector<Message>& messages) const {
  const Communicator& world = parts().world();
  const at::Tensor& parameter = shards_->parts()[shared.part].parameter;
  const at::Tensor piece = tensor;
  if (to != world.rank()) {
    if (piece.numel() > 0) messages.push_back(Message::send(piece, to));
  } else {
    tensor = at::empty(parameter.sizes(), piece.options());
    for (int rank = 0; rank < world.world_size(); ++rank) {
      const ShardPiece part = shards_->piece(shared.part, rank);
      const at::Tensor place = tensor.view({-1}).narrow(0, part.first, part.count);
      if (rank == to) {
        place.copy_(piece);
      } else if (part.count > 0) {
        messages.push_back(Message::receive(place, rank));
      }
    }
  }
  return parameter.numel() * static_cast<int64_t>(piece.element_size());
}

}  // namespace pacer
