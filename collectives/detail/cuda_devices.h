// The GPUs of this process, for choosing one.
#pragma once

#include <array>
#include <cstdint>

namespace pacer::detail {

// 0 without CUDA in this build or a driver on this machine.
int cuda_device_count();
// Numbers that tell it from all other GPUs, also those of other processes and hosts.
std::array<int64_t, 2> cuda_device_id(int device);
// Makes it the current one of this thread. Throws std::exception.
void set_cuda_device(int device);

}  // namespace pacer::detail
