// How a Shards begins: which parameters travel together, and who has which part.
#include <pacer/parallel/shards.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/detail/submodules.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/detail/block_gathers.h>
#include <pacer/parallel/detail/sharded_head.h>
#include <pacer/parallel/detail/touch_remedy.h>

namespace pacer {
namespace {

// From the root's group into one of its own, behind those of the blocks.
void take_head_out(std::vector<ParameterShards::Group>& groups, const at::Tensor& weight) {
  ParameterShards::Group& root = groups.front();
  const auto found = std::find_if(root.begin(), root.end(), [&](const ParameterShards::NamedParameter& item) {
    return item.second.is_same(weight);
  });
  require(
      found != root.end(),
      "ShardsOptions::split_head is for a head outside of the blocks, which this model's is not; leave it "
      "out, as blocks are gathered one by one");
  ParameterShards::Group head = {*found};
  root.erase(found);
  groups.push_back(std::move(head));
}

}  // namespace

void Shards::attach(SessionParts& parts) {
  const SessionOptimizer* optimizer = parts.session_optimizer();
  const bool over_nodes = options_.over() == ShardGroup::node;
  const std::string reason =
      optimizer ? optimizer->unshared_reason(over_nodes ? GradientScope::node : GradientScope::world)
                : "it updates whole parameters";
  require(reason.empty(), "Shards cannot share out the work of this optimizer, because ", reason,
          "; use pacer::FusedAdam, FusedAdamW, FusedLamb, FusedSgd, FusedRmsprop or Muon, or DataParallel in "
          "place of Shards");
  for (const Blocks& blocks : stacks_) detail::require_in_model(parts.model(), *blocks, "Shards");
  if (options_.split_head()) detail::only_head(parts.model());
  GradientExchange::attach(parts);
  require(!over_nodes || parts.world().ranks_per_node() > 0,
          "Shards over nodes gives each rank of a node its part, so that all nodes need as many ranks, which "
          "follow one another; this run's do not: start as many ranks on every machine, machine by machine, "
          "or leave over(ShardGroup::node) out");
  parts.sharded_state = this;
}

void Shards::arrange() {
  check_deferred();
  if (parts().world().world_size() == 1) return;
  require(!parts().replay_optimizer,
          "Shards and CudaGraph do not go together: ranks exchange norms inside the captured step; leave "
          "CudaGraph out");
  choose_ranks();
  const bool has_replicas = ranks_->world_size() < parts().world().world_size();
  const auto replicas = has_replicas ? parts().world().between_nodes() : nullptr;
  ParameterShardsOptions options = options_.parts();
  options.touch_remedy(detail::kTouchRemedy);
  options.piece(parts().session_optimizer()->smallest_piece());
  options.may_stay_local(parts().session_optimizer()->local_parameters());
  options.accumulate_in_fp32(parts().accumulate_in_fp32);
  options.reduce_every_backward(sends_in_every_pass());
  trained_ = detail::trained_parameters(parts());
  if (stacks_.empty()) {
    // Gradients come in the other order, and a unit leaves when it is full and those behind it have left.
    shards_ =
        std::make_shared<ParameterShards>(detail::named_in_model_order(parts()), ranks_, options, replicas);
  } else {
    share_out_blocks(options, replicas);
  }
  update_only_parts();
  parts().gradients_are_shared_out = true;
}

void Shards::share_out_blocks(const ParameterShardsOptions& given,
                              const std::shared_ptr<Communicator>& replicas) {
  ParameterShardsOptions options = given;
  std::vector<ParameterShards::Group> all = groups();
  if (options_.split_head()) {
    const modules::WithHead& with_head = detail::only_head(parts().model());
    take_head_out(all, with_head.head_weight());
    options.split_by_rows({with_head.head_weight()});
    head_slot_ = with_head.head_exchange_slot();
    head_group_ = all.size() - 1;
  }
  shards_ = std::make_shared<ParameterShards>(all, ranks_, options, replicas);
  if (head_slot_ != nullptr) {
    head_slot_->exchange =
        std::make_shared<detail::ShardedHead>(shards_, ranks_, all[head_group_].front().second);
  }
  const auto gathers = std::make_shared<detail::BlockGathers>(
      shards_, all.size(), detail::BlockGathersOptions{options_.prefetch(), options_.keep_after_forward()});
  size_t first = kRoot + 1;
  for (Blocks& blocks : stacks_) {
    blocks->wrap(WrapperLevel::gather,
                 std::make_shared<detail::GatherWrapper>(gathers, first, blocks->size()));
    first += blocks->size();
  }
  gathers_ = gathers;
  parts().parameters_are_shared_out = true;
}

void Shards::choose_ranks() {
  ranks_ = parts().shared_world();
  if (options_.over() == ShardGroup::world) return;
  // Making a group takes all ranks, so they must all be about to.
  require_agreement(parts().world(), parts().progress.step, {{"hook shards", agreement()}});
  ranks_ = parts().world().node();
}

// Of all parameters of model and optimizer: the root's, then those of each block. What a block shares with
// another one, or with a module outside, is the root's.
std::vector<ParameterShards::Group> Shards::groups() const {
  std::unordered_map<const void*, size_t> group_of;
  std::unordered_set<const torch::nn::Module*> stacks;
  size_t count = kRoot + 1;
  const auto put = [&](const at::Tensor& parameter, size_t group) {
    const auto [place, is_new] = group_of.emplace(parameter.unsafeGetTensorImpl(), group);
    if (!is_new && place->second != group) place->second = kRoot;
  };
  for (const Blocks& blocks : stacks_) {
    stacks.insert(blocks.ptr().get());
    for (const auto& block : *blocks) {
      for (const at::Tensor& parameter : block->parameters()) put(parameter, count);
      ++count;
    }
  }
  const std::function<void(const torch::nn::Module&)> put_outside = [&](const torch::nn::Module& module) {
    if (stacks.count(&module) != 0) return;
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) put(parameter, kRoot);
    for (const auto& child : module.children()) put_outside(*child);
  };
  put_outside(parts().model());
  std::vector<ParameterShards::NamedParameter> all = detail::named_in_model_order(parts());
  for (const auto& item : parts().model().named_parameters()) all.emplace_back(item.key(), item.value());
  std::vector<ParameterShards::Group> groups(count);
  std::unordered_set<const void*> seen;
  for (ParameterShards::NamedParameter& item : all) {
    const void* key = item.second.unsafeGetTensorImpl();
    if (!seen.insert(key).second) continue;
    const auto found = group_of.find(key);
    groups[found == group_of.end() ? kRoot : found->second].push_back(std::move(item));
  }
  return groups;
}

}  // namespace pacer
