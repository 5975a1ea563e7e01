#include <pacer/optimizers/detail/onebit_rank_state.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/tensor.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/option_fields.h>

namespace pacer::detail {
namespace {

constexpr const char* kRank = "onebit/rank";
constexpr const char* kWorldSize = "onebit/world_size";
constexpr const char* kRanksPerWorker = "onebit/ranks_of_a_worker";
// Of each compressed parameter, the first element of this rank's part of its node's errors; absent where
// ranks have all of them.
constexpr const char* kParts = "onebit/first_of_parts";
// With which tensors the buckets begin that server errors are cut by; absent where there is one.
constexpr const char* kBuckets = "onebit/first_of_buckets";

at::Tensor first_of_parts(const std::vector<OneBitTensor>& tensors, const Communicator& shard_ranks) {
  std::vector<int64_t> first;
  for (const auto& tensor : tensors) first.push_back(tensor.bounds[static_cast<size_t>(shard_ranks.rank())]);
  return at::tensor(first, at::kLong);
}

}  // namespace

bool has_exchanged(const NamedTensors& state) { return state.count(kRank) != 0; }

bool is_of_rank(const OneBitRoute& route, const NamedTensors& state) {
  return has_exchanged(state) && require_number<int64_t>(state, kRank) == route.world().rank() &&
         require_number<int64_t>(state, kWorldSize) == route.world().world_size() &&
         ranks_per_worker_of(state) == route.ranks_per_worker();
}

int64_t ranks_per_worker_of(const NamedTensors& state) {
  return require_number<int64_t>(state, kRanksPerWorker);
}

void add_rank(const OneBitRoute& route, const std::vector<int64_t>& buckets, NamedTensors& state) {
  if (buckets.size() > 1) state[kBuckets] = at::tensor(buckets, at::kLong);
  state[kRank] = number_tensor(static_cast<int64_t>(route.world().rank()));
  state[kWorldSize] = number_tensor(static_cast<int64_t>(route.world().world_size()));
  state[kRanksPerWorker] = number_tensor(route.ranks_per_worker());
  state[kErrorsVersion] = number_tensor(kStateVersion);
}

void remove_marks(NamedTensors& state) {
  for (const char* key : {kRank, kWorldSize, kRanksPerWorker, kParts, kBuckets, kErrorsVersion})
    state.erase(key);
}

void add_parts(const std::vector<OneBitTensor>& tensors, const Communicator& shard_ranks,
               NamedTensors& state) {
  state[kRanksPerWorker] = number_tensor(static_cast<int64_t>(shard_ranks.world_size()));
  state[kParts] = first_of_parts(tensors, shard_ranks);
}

bool has_same_parts(const NamedTensors& state, const std::vector<OneBitTensor>& tensors,
                    const Communicator* shard_ranks) {
  const auto parts = state.find(kParts);
  if (parts == state.end() || shard_ranks == nullptr) return parts == state.end() && shard_ranks == nullptr;
  if (!parts->second.equal(first_of_parts(tensors, *shard_ranks))) return false;
  return std::all_of(tensors.begin(), tensors.end(), [&](const OneBitTensor& tensor) {
    for (const char* field : {"/worker_error", "/momentum_error"}) {
      const auto error = state.find(tensor.name + field);
      if (error != state.end() && error->second.numel() != tensor.count) return false;
    }
    return true;
  });
}

bool has_buckets(const NamedTensors& state, const std::vector<int64_t>& buckets) {
  const auto saved = state.find(kBuckets);
  if (saved == state.end()) return buckets.size() == 1;
  require(saved->second.scalar_type() == at::kLong && saved->second.dim() == 1, "\"", kBuckets,
          "\" of the state to load is no list of numbers");
  return saved->second.equal(at::tensor(buckets, at::kLong));
}

NamedTensors errors_of_rank(const OneBitRoute& route, NamedTensors state) {
  const Communicator& world = route.world();
  require(!state.empty(),
          "the state to load is frozen, but the errors of this rank are not with it; load them with "
          "import_states");
  const auto rank = require_number<int64_t>(state, kRank);
  const auto world_size = require_number<int64_t>(state, kWorldSize);
  require(rank == world.rank() && world_size == world.world_size(),
          "the state to load has the errors of rank ", rank, " of ", world_size, ", but this is rank ",
          world.rank(), " of ", world.world_size(),
          "; resume with as many ranks, or through join_rank_states");
  const auto ranks_per_worker = require_number<int64_t>(state, kRanksPerWorker);
  require(ranks_per_worker == route.ranks_per_worker(), "the state to load has errors that ",
          ranks_per_worker, " ranks of a node share, but here ", route.ranks_per_worker(),
          " do; resume with as many ranks on each node, or through join_rank_states");
  return state;
}

std::vector<NamedTensors> states_of_workers(const std::vector<NamedTensors>& rank_states,
                                            const std::vector<OneBitTensor>& whole) {
  std::vector<NamedTensors> states;
  if (!rank_states.empty() && rank_states.front().count(kParts) != 0) {
    const auto ranks_per_worker = require_number<int64_t>(rank_states.front(), kRanksPerWorker);
    require(ranks_per_worker >= 1 && static_cast<int64_t>(rank_states.size()) % ranks_per_worker == 0, "\"",
            kRanksPerWorker, "\" of the state to load is ", ranks_per_worker, ", which cannot be with ",
            rank_states.size(), " ranks");
    return whole_errors(rank_states, ranks_per_worker, whole);
  }
  for (const NamedTensors& state : rank_states) {
    const bool is_of_rank = state.count(kRanksPerWorker) != 0;
    const int64_t ranks_per_worker = is_of_rank ? require_number<int64_t>(state, kRanksPerWorker) : 1;
    require(ranks_per_worker >= 1, "\"", kRanksPerWorker, "\" of the state to load is ", ranks_per_worker,
            ", which cannot be");
    if (!is_of_rank || require_number<int64_t>(state, kRank) % ranks_per_worker == 0) states.push_back(state);
  }
  return states;
}

}  // namespace pacer::detail
