// While one exists, any wait for a GPU is an error.
#pragma once

#include <c10/cuda/CUDAFunctions.h>

namespace pacer::testing {

class NoWaiting {
 public:
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  NoWaiting(const NoWaiting&) = delete;
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

}  // namespace pacer::testing
