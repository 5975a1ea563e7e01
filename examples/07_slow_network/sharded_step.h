// A training step of FusedAdamW whose ranks share the work out, for a model of which there are only the
// shapes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/parallel/shards.h>

namespace slow_network {

using Parameters = std::vector<std::pair<std::string, at::Tensor>>;

// What travels at once, where it is cut.
constexpr int64_t kBucketBytes = 25 << 20;

// What ranks have parts of: gradients and state, or with `blocks` the parameters, too; of the world or of a
// node. The model adds up its parameters, so that forward and backward take as long as reading and writing
// them.
std::function<void()> sharded_step(const Parameters& parameters,
                                   const std::shared_ptr<pacer::Communicator>& world, bool blocks,
                                   pacer::ShardGroup over);

}  // namespace slow_network
