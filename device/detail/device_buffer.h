// A host array that kernels read: where the device is the CPU the array itself, on CUDA a copy in device
// memory that is sent through pinned memory, without synchronising, whenever the host array changed.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <pacer/device/detail/stream.h>

namespace pacer::detail {

template <class T>
class DeviceBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  std::vector<T>& host() { return host_; }
  const std::vector<T>& host() const { return host_; }

  // Must be called after every change of the host array, before pointer().
  void mark_changed() { changed_ = true; }
  // Changes an element, where it is another.
  void set(size_t i, const T& value) {
    if (host_[i] == value) return;
    host_[i] = value;
    changed_ = true;
  }

  // Sends the host array where it changed.
  void send(at::Device device) {
    if (!changed_ || device.is_cpu()) return;
    refuse_capture(device);
    // T may be a pointer.
    const auto bytes = static_cast<int64_t>(host_.size() * sizeof(T));  // NOLINT(bugprone-sizeof-expression)
    if (!device_.defined() || device_.numel() != bytes || device_.device() != device) {
      device_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    }
    at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    if (bytes > 0) std::memcpy(pinned.mutable_data_ptr(), host_.data(), static_cast<size_t>(bytes));
    device_.copy_(pinned, /*non_blocking=*/true);
    changed_ = false;
  }

  const T* pointer() const {
    return device_.defined() ? static_cast<const T*>(device_.const_data_ptr()) : host_.data();
  }

 private:
  std::vector<T> host_;
  at::Tensor device_;
  bool changed_ = true;
};

}  // namespace pacer::detail
