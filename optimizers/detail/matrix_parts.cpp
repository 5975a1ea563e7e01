#include <pacer/optimizers/detail/matrix_parts.h>

#include <ATen/ops/_foreach_copy.h>

namespace pacer::detail {

void MatrixParts::add(const Communicator& ranks, const at::Tensor& own, const std::vector<int64_t>& bounds,
                      int owner, const at::Tensor& whole) {
  if (owner != ranks.rank()) {
    if (own.numel() > 0) sent_.push_back({own, owner});
    return;
  }
  for (int rank = 0; rank < ranks.world_size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (bounds[r] == bounds[r + 1]) continue;
    const at::Tensor place = whole.narrow(0, bounds[r], bounds[r + 1] - bounds[r]);
    if (rank != owner) {
      received_.push_back({place, rank});
    } else {
      parts_.push_back(own);
      in_whole_.push_back(place);
    }
  }
}

Work MatrixParts::gather(Communicator& ranks) const {
  if (!parts_.empty()) at::_foreach_copy_(in_whole_, parts_);
  std::vector<Message> messages;
  for (const Way& way : sent_) messages.push_back(Message::send(way.memory, way.peer));
  for (const Way& way : received_) messages.push_back(Message::receive(way.memory, way.peer));
  return messages.empty() ? Work() : ranks.send_receive(messages);
}

Work MatrixParts::scatter(Communicator& ranks) const {
  if (!parts_.empty()) at::_foreach_copy_(parts_, in_whole_);
  std::vector<Message> messages;
  for (const Way& way : received_) messages.push_back(Message::send(way.memory, way.peer));
  for (const Way& way : sent_) messages.push_back(Message::receive(way.memory, way.peer));
  return messages.empty() ? Work() : ranks.send_receive(messages);
}

}  // namespace pacer::detail
