// How small messages of all ranks get to all ranks in few hops.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/operation_queue.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// output = the inputs of all ranks, in their order, over the connection's transport for small messages: in
// ceil(log2(world size)) hops, each of which doubles what a rank knows (Bruck et al. 1997).
OperationParts gather_parts(const Connection& connection, const at::Tensor& output, const at::Tensor& input);

// The texts of all ranks, of any lengths, by `gather`: an all_gather of bytes that has ended when it returns.
std::vector<std::string> gather_texts(
    const std::string& own, int world_size,
    const std::function<void(const at::Tensor& output, const at::Tensor& input)>& gather);

}  // namespace pacer::detail
