// Sums whose order is the ranks' order, from operations that only move bytes: every rank is sent everybody's
// part of one chunk, adds the parts as they are numbered, and sends the sum to all.
#pragma once

#include <pacer/collectives/detail/operation_queue.h>

namespace pacer::detail {

// tensor = ((x0 + x1) + x2) + ... over ranks. Memory for two more copies of the tensor while it runs.
TransportCalls ordered_all_reduce(const at::Tensor& tensor, int rank, int world_size);
// output = the same of chunk number `rank` of the inputs.
TransportCalls ordered_reduce_scatter(const at::Tensor& output, const at::Tensor& input, int world_size);

}  // namespace pacer::detail
