// The life of an NCCL communicator: set-up, calls, failure, abort. Threads that call something that may hang
// are detached and hold the NcclComm, so that leaving one behind leaves no dangling pointer behind.
#include <pacer/collectives/detail/nccl_comm.h>

#if PACER_WITH_NCCL

#include <algorithm>
#include <cstring>
#include <thread>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <pacer/collectives/detail/transport.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId), "NCCL's ids have another size");

// How long an abort lets a call of NCCL return first. Calls do not block, unless the environment variable
// NCCL_COMM_BLOCKING says so; then the abort is what ends the call.
constexpr std::chrono::milliseconds kNcclCallLimit{1000};
// How long NCCL may take to end in peace before it is aborted.
constexpr std::chrono::milliseconds kNcclFinalizeLimit{2000};

// A thread of our own works for this device, and does not disturb a CUDA graph that another thread captures.
void set_up_nccl_thread(c10::Device device) {
  cudaSetDevice(device.index());
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  cudaThreadExchangeStreamCaptureMode(&mode);
}

// NCCL's thread for a call takes some tens of microseconds where nothing has to be connected.
void pause_nccl_poll(NcclComm::Clock::time_point begin) {
  if (NcclComm::Clock::now() - begin < std::chrono::milliseconds(1)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Nothing of it is under way.
void finalize_nccl(ncclComm* comm) {
  const auto begin = NcclComm::Clock::now();
  ncclResult_t state = ncclCommFinalize(comm);
  while (state == ncclInProgress && NcclComm::Clock::now() - begin < kNcclFinalizeLimit) {
    pause_nccl_poll(begin);
    if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) break;
  }
  if (state == ncclSuccess) {
    ncclCommDestroy(comm);
  } else {
    ncclCommAbort(comm);
  }
}

}  // namespace

std::string nccl_error_text(const char* name, int result) {
  const char* last = ncclGetLastError(nullptr);
  std::string detail = last != nullptr ? last : "";
  std::replace(detail.begin(), detail.end(), '\n', ' ');
  while (!detail.empty() && (detail.back() == ' ' || detail.back() == '.')) detail.pop_back();
  const char* const kind = ncclGetErrorString(static_cast<ncclResult_t>(result));
  return concatenate("NCCL failed in ", name, ": ", kind, detail.empty() ? "" : ", ", detail);
}

std::shared_ptr<NcclComm> NcclComm::create(const NcclId& id, int rank, int world_size, c10::Device device,
                                           Milliseconds timeout) {
  auto comm = std::make_shared<NcclComm>(rank, world_size, device);
  std::thread([comm, id] { comm->initialize(id); }).detach();
  std::unique_lock<std::mutex> lock(comm->mutex_);
  const bool in_time =
      comm->changed_.wait_for(lock, timeout, [&] { return comm->is_ready_ || comm->has_failed(); });
  lock.unlock();
  if (!in_time) {
    comm->fail("setting up NCCL was not done by the deadline: another rank has not come", true);
    comm->wait_ended(kAbortLimit);
  }
  comm->check();
  return comm;
}

void NcclComm::initialize(const NcclId& id) {
  try {
    set_up_nccl_thread(device_);
    ncclUniqueId unique_id;
    std::memcpy(&unique_id, id.data(), sizeof(unique_id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm* comm = nullptr;
    const int result = ncclCommInitRankConfig(&comm, world_size_, unique_id, rank_, &config);
    bool too_late = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      comm_ = comm;
      is_known_ = comm != nullptr;
      too_late = has_failed();
    }
    if (too_late) {
      if (comm != nullptr) {
        start_ending(&NcclComm::abort_now);
      } else {
        set_ended();
      }
      return;
    }
    if (result != ncclSuccess && result != ncclInProgress) {
      fail(nccl_error_text("setting up", result), false);
      return;
    }
    settle("setting up");
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ready_ = true;
    changed_.notify_all();
  } catch (const std::exception& error) {
    fail(error.what(), false);  // settle() has failed already, with better words
  }
}

void NcclComm::enqueue(const char* name, const NcclCall& call) {
  int result = ncclSuccess;
  {
    const std::lock_guard<std::timed_mutex> lock(calls_);
    check();
    result = call(comm_);
  }
  if (result == ncclInProgress) {
    settle(name);
  } else if (result != ncclSuccess) {
    fail(nccl_error_text(name, result), false);
  }
  check();
}

void NcclComm::settle(const char* name) {
  const auto begin = Clock::now();
  for (;;) {
    ncclResult_t state = ncclInProgress;
    {
      const std::lock_guard<std::timed_mutex> lock(calls_);
      check();
      const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
      if (result != ncclSuccess) state = result;
    }
    if (state == ncclSuccess) return;
    if (state != ncclInProgress) {
      fail(nccl_error_text(name, state), false);
      check();
    }
    pause_nccl_poll(begin);
  }
}

void NcclComm::poll() noexcept {
  try {
    ncclResult_t state = ncclSuccess;
    {
      const std::unique_lock<std::timed_mutex> lock(calls_, std::try_to_lock);
      if (!lock.owns_lock() || has_failed()) return;
      const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
      if (result != ncclSuccess) state = result;
    }
    if (state != ncclSuccess && state != ncclInProgress) {
      fail(nccl_error_text("an operation under way", state), false);
    }
  } catch (const std::exception&) {  // no memory for words: the deadline is left
  }
}

void NcclComm::check() const {
  if (!has_failed()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_timeout_) throw TransportTimeout(reason_);
  throw Error(reason_);
}

// True for the first that comes with a failure.
bool NcclComm::claim(const std::string& reason, bool is_timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed()) return false;
  reason_ = reason;
  is_timeout_ = is_timeout;
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
  return true;
}

void NcclComm::fail(const std::string& reason, bool is_timeout) noexcept {
  try {
    if (claim(reason, is_timeout)) start_ending(&NcclComm::abort_now);
  } catch (const std::exception&) {
    failed_.store(true, std::memory_order_release);  // no memory for the reason
  }
}

void NcclComm::start_ending(void (NcclComm::*end)()) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_known_ || is_ending_) return;  // not known yet: initialize() comes here again
    is_ending_ = true;
  }
  std::thread([self = shared_from_this(), end] { (self.get()->*end)(); }).detach();
}

void NcclComm::abort_now() {
  set_up_nccl_thread(device_);
  const std::unique_lock<std::timed_mutex> lock(calls_, kNcclCallLimit);
  ncclCommAbort(comm_);
  set_ended();
}

void NcclComm::finalize_now() {
  set_up_nccl_thread(device_);
  const std::unique_lock<std::timed_mutex> lock(calls_, kNcclCallLimit);
  finalize_nccl(comm_);
  set_ended();
}

void NcclComm::close(Milliseconds limit) noexcept {
  try {
    if (claim("NCCL was shut down by this rank", false)) start_ending(&NcclComm::finalize_now);
  } catch (const std::exception&) {  // no thread to be had: left to the end of the process
    return;
  }
  wait_ended(limit);
}

void NcclComm::set_ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_ended_ = true;
  changed_.notify_all();
}

bool NcclComm::wait_ended(Milliseconds limit) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return is_ended_; });
}

void NcclComm::wait_ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_ended_; });
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
