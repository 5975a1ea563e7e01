// What a 1-bit optimizer's state of one rank says beside its errors: whose they are, and how they were cut.
#pragma once

#include <cstdint>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/compression/detail/onebit_route.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Errors are those of one rank of so many, even where chunks of other worlds have the same size.
void add_rank(const OneBitRoute& route, const std::vector<int64_t>& first_of_buckets, NamedTensors& state);
// Each of these ranks has a part of its node's.
void add_parts(const std::vector<OneBitTensor>& tensors, const Communicator& shard_ranks,
               NamedTensors& state);
// What both have added.
void remove_marks(NamedTensors& state);

// Whether add_rank was called, and how many ranks of a worker it saw.
bool has_exchanged(const NamedTensors& state);
// Whether it saw this rank, of as many.
bool is_of_rank(const OneBitRoute& route, const NamedTensors& state);
int64_t ranks_per_worker_of(const NamedTensors& state);
// Whether the errors of such a state are those of these parts, or of whole tensors where there are no
// shard ranks.
bool has_same_parts(const NamedTensors& state, const std::vector<OneBitTensor>& tensors,
                    const Communicator* shard_ranks);
// Whether they were cut by these buckets.
bool has_buckets(const NamedTensors& state, const std::vector<int64_t>& first_of_buckets);

// The errors alone, which must be those of this rank.
NamedTensors errors_of_rank(const OneBitRoute& route, NamedTensors state);
// Returns a state for each worker: that of its first rank if its ranks share their errors, or what its ranks
// have together if each has a part.
std::vector<NamedTensors> states_of_workers(const std::vector<NamedTensors>& rank_states,
                                            const std::vector<OneBitTensor>& whole);

}  // namespace pacer::detail
