#include <pacer/collectives/detail/gather.h>

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr int64_t kLongestText = int64_t{1} << 30;

}  // namespace

TransportCalls gather_calls(const Connection& connection, const at::Tensor& output, const at::Tensor& input) {
  if (connection.control->gathers_in_one_hop() || connection.world_size == 1) {
    return TransportCall([=](Transport& transport, Transport::Milliseconds timeout) {
      return transport.all_gather(output, input, timeout);
    });
  }
  const int64_t rank = connection.rank, ranks = connection.world_size;
  const int64_t n = input.numel();
  const at::Tensor known = at::empty({ranks, n}, input.options().requires_grad(false));
  const auto begin = [=] {
    const at::NoGradGuard no_grad;
    known[0].copy_(input.view({-1}));
  };
  // Row i is the input of rank `rank + i`.
  TransportCalls calls;
  for (int64_t distance = 1; distance < ranks; distance *= 2) {
    const int64_t count = std::min(distance, ranks - distance);
    const auto to = static_cast<int>((rank + ranks - distance) % ranks);
    const auto from = static_cast<int>((rank + distance) % ranks);
    calls.calls.emplace_back([=](Transport& transport, Transport::Milliseconds timeout) {
      if (distance == 1) begin();
      return transport.exchange({Message::receive(known.narrow(0, distance, count), from),
                                 Message::send(known.narrow(0, 0, count), to)},
                                timeout);
    });
  }
  calls.after = [=] {
    const at::NoGradGuard no_grad;
    const at::Tensor rows = output.view({ranks, n});
    rows.narrow(0, rank, ranks - rank).copy_(known.narrow(0, 0, ranks - rank));
    if (rank > 0) rows.narrow(0, 0, rank).copy_(known.narrow(0, ranks - rank, rank));
  };
  return calls;
}

std::vector<std::string> gather_texts(const std::string& own, int world_size, const GatherBytes& gather) {
  const at::Tensor length = at::empty({1}, at::kLong), lengths = at::empty({world_size}, at::kLong);
  length.fill_(static_cast<int64_t>(own.size()));
  gather(lengths, length);
  const auto* sizes = lengths.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < world_size; ++r) {
    require<Error>(0 <= sizes[r] && sizes[r] <= kLongestText, "rank ", r, " announces a text of ", sizes[r],
                   " bytes, which cannot be; look at the network and the memory of its host");
  }
  const int64_t longest = *std::max_element(sizes, sizes + world_size);
  const at::Tensor mine = at::empty({longest}, at::kByte), all = at::empty({world_size * longest}, at::kByte);
  if (!own.empty()) std::memcpy(mine.mutable_data_ptr(), own.data(), own.size());
  if (longest > 0) gather(all, mine);
  std::vector<std::string> texts;
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  for (int64_t r = 0; r < world_size; ++r) {
    texts.emplace_back(bytes + r * longest, static_cast<size_t>(sizes[r]));
  }
  return texts;
}

void gather_memory(const void* own, void* all, size_t bytes, int world_size, const GatherBytes& gather) {
  const auto size = static_cast<int64_t>(bytes);
  const at::Tensor mine = at::empty({size}, at::kByte), gathered = at::empty({world_size * size}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), own, bytes);
  gather(gathered, mine);
  std::memcpy(all, gathered.const_data_ptr(), bytes * static_cast<size_t>(world_size));
}

}  // namespace pacer::detail
