#include <pacer/optimizers/detail/matrix_parts.h>

#include <ATen/ops/_foreach_copy.h>

namespace pacer::detail {

void MatrixParts::add(const Communicator& ranks, const at::Tensor& own, const std::vector<int64_t>& bounds,
                      int owner, const at::Tensor& whole) {
  if (owner != ranks.rank()) {
    if (own.numel() > 0) parts_.elsewhere.emplace_back(own, owner);
    return;
  }
  for (int rank = 0; rank < ranks.world_size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (bounds[r] == bounds[r + 1]) continue;
    const at::Tensor place = whole.narrow(0, bounds[r], bounds[r + 1] - bounds[r]);
    if (rank != owner) {
      wholes_.elsewhere.emplace_back(place, rank);
    } else {
      parts_.here.push_back(own);
      wholes_.here.push_back(place);
    }
  }
}

Work MatrixParts::travel(Communicator& ranks, const Places& from, const Places& to) {
  if (!from.here.empty()) at::_foreach_copy_(to.here, from.here);
  std::vector<Message> messages;
  for (const auto& [memory, rank] : from.elsewhere) messages.push_back(Message::send(memory, rank));
  for (const auto& [memory, rank] : to.elsewhere) messages.push_back(Message::receive(memory, rank));
  return messages.empty() ? Work() : ranks.send_receive(messages);
}

Work MatrixParts::gather(Communicator& ranks) const { return travel(ranks, parts_, wholes_); }
Work MatrixParts::scatter(Communicator& ranks) const { return travel(ranks, wholes_, parts_); }

}  // namespace pacer::detail
