// What Checkpoints asks of Shards: whole tensors from what each rank has of them.
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/shards.h>

namespace pacer {
namespace {

constexpr int64_t kGatheredBytes = int64_t{64} << 20;  // at once, of a state on its way to who writes it

// The shape of what ranks have parts of, an element of it for so many of the parameter's.
std::vector<int64_t> whole_sizes(const at::Tensor& parameter, int64_t elements_each) {
  if (elements_each == 1) return parameter.sizes().vec();
  return {ceil_divide(parameter.numel(), elements_each)};
}

}  // namespace

std::vector<Shards::SharedTensor> Shards::shared_tensors(const NamedTensors& state) const {
  std::vector<SharedTensor> shared;
  if (!shards_) return shared;
  for (size_t i = 0; i < shards_->parts().size(); ++i) {
    const std::string prefix =
        parts().session_optimizer()->parameter_name(shards_->parts()[i].parameter) + "/";
    for (auto item = state.lower_bound(prefix);
         item != state.end() && item->first.compare(0, prefix.size(), prefix) == 0; ++item) {
      const bool is_field =
          item->first.find('/', prefix.size()) == std::string::npos;  // not "a/b/FIELD" of "a"
      const bool is_of_hook =
          item->first.compare(prefix.size(), std::strlen(kFieldOfHook), kFieldOfHook) == 0;
      const bool is_part =
          is_of_hook ? keeps_parts() : parts().session_optimizer()->is_part(item->first, item->second);
      if (is_field && is_part) {
        shared.push_back({item->first, i, parts().session_optimizer()->elements_each(item->first)});
      }
    }
  }
  return shared;
}

ParameterRanges Shards::kept_parts() const {
  ParameterRanges kept;
  for (const ParameterShards::Part& part : shards_->parts()) {
    kept.emplace(part.parameter.unsafeGetTensorImpl(), part);
  }
  return kept;
}

NamedTensors Shards::whole_specs(NamedTensors state) const {
  for (const SharedTensor& shared : shared_tensors(state)) {
    at::Tensor& tensor = state.at(shared.name);
    const at::Tensor& parameter = shards_->parts()[shared.part].parameter;
    tensor = at::empty(whole_sizes(parameter, shared.elements_each), tensor.options().device(at::kMeta));
  }
  return state;
}

NamedTensors Shards::gather_state(NamedTensors state, const StateOwner& owner) const {
  const std::vector<SharedTensor> shared = shared_tensors(state);
  return gather_tensors(std::move(state), shared, owner);
}

NamedTensors Shards::gather_model(NamedTensors model, const StateOwner& owner) const {
  if (!keeps_parts()) return model;
  require(!shards_->all_are_gathered(),
          "weights are saved while what Session::whole_parameters() returned still exists, and may have been "
          "changed there; end its scope first");
  std::unordered_map<const void*, size_t> part_of;
  for (size_t i = 0; i < shards_->parts().size(); ++i) {
    part_of.emplace(shards_->parts()[i].parameter.unsafeGetTensorImpl(), i);
  }
  std::vector<SharedTensor> shared;
  for (auto& [name, tensor] : model) {
    const auto found = part_of.find(tensor.unsafeGetTensorImpl());
    if (found == part_of.end()) continue;
    shared.push_back({name, found->second});
    tensor = shards_->parts()[found->second].values;
  }
  return gather_tensors(std::move(model), shared, owner);
}

NamedTensors Shards::gather_tensors(NamedTensors tensors, const std::vector<SharedTensor>& shared,
                                    const StateOwner& owner) const {
  if (shared.empty()) return tensors;
  const at::NoGradGuard no_grad;
  std::vector<Message> messages;
  std::vector<std::string> mine;  // among those under way
  int64_t bytes = 0;
  // The ranks that have all parts of what is gathered here follow one another.
  const int first_rank = parts().world().rank() - ranks_->rank();
  const auto complete = [&] {
    ranks_->send_receive(std::exchange(messages, {})).wait();
    for (const std::string& name : mine) tensors.at(name) = tensors.at(name).cpu();
    mine.clear();
    bytes = 0;
  };
  for (const SharedTensor& item : shared) {
    const int to = owner(item.name) - first_rank;
    if (to < 0 || to >= ranks_->world_size()) continue;  // another group's
    at::Tensor& tensor = tensors.at(item.name);
    bytes += collect(item, to, tensor, messages);
    if (to == ranks_->rank()) mine.push_back(item.name);
    if (bytes >= kGatheredBytes) complete();
  }
  complete();
  return tensors;
}

// `tensor`, this rank's piece, becomes the whole one where it goes to, once the messages have come. Returns
// the bytes of the whole one.
int64_t Shards::collect(const SharedTensor& shared, int to, at::Tensor& tensor,
                        std::vector<Message>& messages) const {
  const at::Tensor& parameter = shards_->parts()[shared.part].parameter;
  const at::Tensor piece = tensor.to(parameter.device());  // paged state is in host memory
  if (to != ranks_->rank()) {
    if (piece.numel() > 0) messages.push_back(Message::send(piece, to));
  } else {
    tensor = at::empty(whole_sizes(parameter, shared.elements_each), piece.options());
    const std::vector<int64_t>& bounds = shards_->parts()[shared.part].bounds;
    for (int rank = 0; rank < ranks_->world_size(); ++rank) {
      const auto r = static_cast<size_t>(rank);
      const at::Tensor place = tensor.view({-1}).slice(0, ceil_divide(bounds[r], shared.elements_each),
                                                       ceil_divide(bounds[r + 1], shared.elements_each));
      if (rank == to) {
        place.copy_(piece);
      } else if (place.numel() > 0) {
        messages.push_back(Message::receive(place, rank));
      }
    }
  }
  return ceil_divide(parameter.numel(), shared.elements_each) * static_cast<int64_t>(piece.element_size());
}

}  // namespace pacer
