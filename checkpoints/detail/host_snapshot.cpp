#include <pacer/checkpoints/detail/host_snapshot.h>

#include <algorithm>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

constexpr int64_t kLargestBlock = int64_t{256} << 20;
constexpr int64_t kAlignment = 64;

// A power of two, as LibTorch makes every piece of page-locked memory.
int64_t block_for(int64_t bytes) {
  int64_t block = kAlignment;
  while (block < bytes) block *= 2;
  return block;
}

}  // namespace

at::Tensor HostSnapshot::Arena::cut(const at::Tensor& like, int64_t total) {
  const auto bytes = static_cast<int64_t>(like.nbytes());
  while (block < blocks.size() && used + bytes > blocks[block].numel()) {
    ++block;
    used = 0;
  }
  if (block == blocks.size()) {
    blocks.push_back(at::empty({block_for(std::max(bytes, std::min(total, kLargestBlock)))},
                               at::TensorOptions(at::kByte).pinned_memory(is_page_locked)));
  }
  const at::Tensor piece = blocks[block].narrow(0, used, bytes).view(like.scalar_type()).view(like.sizes());
  used = round_up(used + bytes, kAlignment);
  return piece;
}

TensorsByFile HostSnapshot::take(const TensorsByFile& files) {
  const at::NoGradGuard no_grad;
  for (Arena* blocks : {&pageable_, &page_locked_}) {
    blocks->block = 0;
    blocks->used = 0;
  }
  int64_t total = 0;
  for (const auto& file : files) {
    for (const auto& item : file.second) {
      total += round_up(static_cast<int64_t>(item.second.nbytes()), kAlignment);
    }
  }
  TensorsByFile copies;
  std::optional<at::Device> device;
  for (const auto& [name, tensors] : files) {
    NamedTensors& of_file = copies.emplace_back(name, NamedTensors()).second;
    for (const auto& [key, tensor] : tensors) {
      if (!tensor.is_cpu()) device = tensor.device();
      at::Tensor copy = (tensor.is_cuda() ? page_locked_ : pageable_).cut(tensor, total);
      copy.copy_(tensor, /*non_blocking=*/true);
      of_file.emplace(key, std::move(copy));
    }
  }
  if (device) c10::impl::VirtualGuardImpl(device->type()).getStream(*device).synchronize();
  return copies;
}

}  // namespace pacer::detail
