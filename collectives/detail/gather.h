// How small messages of all ranks get to all ranks in few hops.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include <pacer/collectives/detail/operation_queue.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// output = the inputs of all ranks, in their order, over the connection's transport for small messages: in
// ceil(log2(world size)) hops, each of which doubles what a rank knows (Bruck et al. 1997).
TransportCalls gather_calls(const Connection& connection, const at::Tensor& output, const at::Tensor& input);

// An all_gather of bytes that has ended when it returns.
using GatherBytes = std::function<void(const at::Tensor& output, const at::Tensor& input)>;

// The texts of all ranks, of any lengths.
std::vector<std::string> gather_texts(const std::string& own, int world_size, const GatherBytes& gather);

// The values of all ranks, byte for byte.
void gather_memory(const void* own, void* all, size_t bytes, int world_size, const GatherBytes& gather);
template <class T>
std::vector<T> gather_values(const T& own, int world_size, const GatherBytes& gather) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(world_size), own);
  gather_memory(&own, all.data(), sizeof(T), world_size, gather);
  return all;
}

}  // namespace pacer::detail
