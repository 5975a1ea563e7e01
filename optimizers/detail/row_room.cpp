#include <pacer/optimizers/detail/row_room.h>

#include <algorithm>

#include <ATen/ops/empty.h>

namespace pacer::detail {

using at::Tensor;

Tensor RowRoom::with_room(const Tensor& tensor, int64_t more) {
  made_.erase(std::remove_if(made_.begin(), made_.end(),
                             [](const Memory& memory) { return memory.storage.expired(); }),
              made_.end());
  std::vector<int64_t> sizes = tensor.sizes().vec();
  const int64_t rows = sizes.front();
  sizes.front() = rows + more;
  const int64_t elements = c10::multiply_integers(sizes);
  const auto grown_in = [&](const c10::Storage& storage) {
    return at::empty({0}, tensor.options()).set_(storage, 0, sizes);
  };
  for (Memory& memory : made_) {
    const auto storage = memory.storage.lock();
    if (storage.get() != tensor.storage().unsafeGetStorageImpl()) continue;
    const bool has_all_in_use =
        tensor.storage_offset() == 0 && tensor.is_contiguous() && tensor.numel() == memory.elements;
    if (!has_all_in_use || static_cast<size_t>(elements) * tensor.element_size() > storage->nbytes()) break;
    memory.elements = elements;
    return grown_in(tensor.storage());
  }
  std::vector<int64_t> room = sizes;
  room.front() = std::max(sizes.front(), 2 * rows);
  const Tensor memory = at::empty(room, tensor.options());
  Tensor grown = grown_in(memory.storage());
  grown.narrow(0, 0, rows).copy_(tensor);
  made_.push_back({memory.storage().getWeakStorageImpl(), elements});
  return grown;
}

Tensor RowRoom::extended(const Tensor& tensor, const Tensor& more) {
  Tensor grown = with_room(tensor, more.size(0));
  grown.narrow(0, tensor.size(0), more.size(0)).copy_(more);
  return grown;
}

Tensor RowRoom::extended(const Tensor& tensor, int64_t zeros) {
  Tensor grown = with_room(tensor, zeros);
  grown.narrow(0, tensor.size(0), zeros).zero_();
  return grown;
}

}  // namespace pacer::detail
