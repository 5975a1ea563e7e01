// The GPUs of this process, for choosing one.
#pragma once

namespace pacer::detail {

// 0 without CUDA in this build or a driver on this machine.
int cuda_device_count();
// Makes it the current one of this thread. Throws std::exception.
void set_cuda_device(int device);

}  // namespace pacer::detail
