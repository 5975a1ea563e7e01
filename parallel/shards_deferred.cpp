// How a Shards gives values to blocks that have none, so that one of them is whole at a time.
#include <pacer/parallel/shards.h>

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/deferred_storage.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/detail/deferred_blocks.h>

namespace pacer {
namespace {

Fact checksum_of_value(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return {"initial value of parameter " + name,
          "checksum " + Checksum().add(host.const_data_ptr(), host.nbytes()).hex()};
}

}  // namespace

void Shards::start(const Progress& progress) {
  if (parts().world().world_size() == 1) materialize();
  GradientExchange::start(progress);
}

void Shards::check_deferred() const {
  const detail::DeferredBlocks deferred(parts().model(), stacks_);
  require(!options_.materialize() || !deferred.blocks().empty(),
          "ShardsOptions::materialize gives values to blocks without memory, and this model has none; call "
          "defer_initialization for each block once it is made, or leave materialize out");
}

void Shards::materialize() {
  const at::NoGradGuard no_grad;
  detail::DeferredBlocks deferred(parts().model(), stacks_);
  deferred.require_values(options_.materialize() != nullptr);
  if (deferred.blocks().empty()) return;
  Communicator& world = parts().data_ranks();
  const bool compares = options_.initial_parameters() == InitialParameters::check && world.world_size() > 1;
  std::vector<Fact> values;
  if (shards_) shards_->give_memory(kRoot);  // to what several blocks have
  for (const auto& block : deferred.blocks()) {
    const size_t group = kRoot + 1 + block.block.index;
    shards_ ? shards_->give_memory(group) : deferred.give_memory(block);
    deferred.fill(block, options_.materialize());
    std::vector<at::Tensor> shared;  // what a checkpoint has is the same on all ranks
    for (const size_t parameter : deferred.without_values(block)) {
      const at::Tensor& tensor = deferred.tensor(parameter);
      if (compares) values.push_back(checksum_of_value(deferred.name(parameter), tensor));
      if (!compares && world.world_size() > 1) shared.push_back(tensor);
    }
    detail::broadcast_all(world, shared);
    shared.clear();
    if (shards_) shards_->keep_part(group);
    detail::return_freed_memory();
  }
  if (!values.empty()) require_agreement(world, parts().progress.step, values);
}

}  // namespace pacer
