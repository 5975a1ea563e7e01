// The optimizer in full precision whose steps a 1-bit optimizer takes in its warm-up, on one process.
#pragma once

#include <memory>
#include <vector>

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing {

// Over `parameters`, which are those of `groups` in turn.
template <class OneBit>
std::unique_ptr<PeerOf<OneBit>> peer_of(const GroupsOf<OneBit>& groups,
                                        const std::vector<Tensor>& parameters) {
  using Options = OptionsOf<PeerOf<OneBit>>;
  std::vector<torch::optim::OptimizerParamGroup> parts;
  auto next = parameters.begin();
  for (const auto& group : groups) {
    const auto end = next + static_cast<int64_t>(group.shapes.size());
    const Options options = Family<OneBit>::peer_options(group.options);
    parts.emplace_back(std::vector<Tensor>(next, end), std::make_unique<Options>(options));
    next = end;
  }
  return std::make_unique<PeerOf<OneBit>>(parts, Family<OneBit>::peer_options(groups.front().options));
}

// Takes a step with the mean of all ranks' gradients, added in rank order. `first`: of the gradients.
inline void step_with_mean(FusedOptimizer& peer, const std::vector<Tensor>& parameters,
                           const std::vector<std::vector<Tensor>>& gradients, size_t first = 0) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Tensor sum = gradients[0][first + i].clone();
    for (size_t rank = 1; rank < gradients.size(); ++rank) sum = sum + gradients[rank][first + i];
    parameters[i].mutable_grad() = sum;
  }
  StepInputs inputs;
  inputs.average = 1.0 / static_cast<double>(gradients.size());
  contract(peer).prepare(inputs);
  contract(peer).conclude(contract(peer).enqueue());
}

}  // namespace pacer::testing
