// Sums whose order is the ranks' order, from operations that only move bytes: every rank is sent everybody's
// part of one chunk, adds the parts as they are numbered, and sends the sum to all.
#pragma once

#include <memory>
#include <vector>

#include <pacer/collectives/detail/operation_queue.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// sum = parts[0] + parts[1] + ..., `parts` being `count` pieces of the size of `sum`, one behind the other.
void add_in_order(const at::Tensor& sum, const at::Tensor& parts, int count);
// tensor = ((x0 + x1) + x2) + ... over ranks. Memory for two more copies of the tensor while it runs.
OperationParts ordered_all_reduce(std::shared_ptr<Transport> transport, const at::Tensor& tensor, int rank,
                                  int world_size, std::chrono::milliseconds timeout);
// output = the same of chunk `rank` of the inputs.
OperationParts ordered_reduce_scatter(std::shared_ptr<Transport> transport, const at::Tensor& output,
                                      const at::Tensor& input, int rank, int world_size,
                                      std::chrono::milliseconds timeout);

// Both at once, so that a ring of ranks that all send and receive cannot wait for each other.
TransportWorkPtr send_and_receive(Transport& transport, const at::Tensor& sent, int to,
                                  const at::Tensor& received, int from, std::chrono::milliseconds timeout);

}  // namespace pacer::detail
