// CUDA events around an operation. Errors of CUDA are one sentence here; a query that is not done yet leaves
// no error behind.
#include <pacer/collectives/detail/nccl_operation.h>

#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

void require_cuda_success(cudaError_t error, const char* name, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(concatenate(name, " could not ", what, ": ", cudaGetErrorString(error)));
}

bool has_event_passed(cudaEvent_t event, const char* name) {
  const cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  require_cuda_success(error, name, "end");
  return true;
}

}  // namespace

CudaEventPool::~CudaEventPool() {
  for (CUevent_st* event : free_) cudaEventDestroy(event);  // any device may be current
}

CUevent_st* CudaEventPool::take() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      CUevent_st* const event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  const c10::cuda::CUDAGuard guard(device_);
  CUevent_st* event = nullptr;
  require_cuda_success(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "a collective",
                       "make an event");
  return event;
}

void CudaEventPool::give_back(CUevent_st* event) noexcept {
  if (event == nullptr) return;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  } catch (const std::exception&) {
    cudaEventDestroy(event);
  }
}

void refuse_captured_stream(CUstream_st* stream, const char* name) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require_cuda_success(cudaStreamIsCapturing(stream, &status), name, "ask whether the stream is captured");
  require<Error>(status == cudaStreamCaptureStatusNone, name,
                 " cannot become part of a CUDA graph: start collectives, and wait for them, outside of the "
                 "capture");
}

void make_stream_wait(CUstream_st* stream, CUevent_st* event, const char* name) {
  require_cuda_success(cudaStreamWaitEvent(stream, event, 0), name, "make a stream wait");
}

NcclOperation::NcclOperation(const char* name, std::chrono::milliseconds timeout,
                             std::vector<at::Tensor> tensors, std::shared_ptr<CudaEventPool> events)
    : name_(name), timeout_(timeout), events_(std::move(events)), tensors_(std::move(tensors)) {
  start_ = events_->take();
  try {
    end_ = events_->take();
  } catch (...) {
    events_->give_back(start_);
    throw;
  }
}

NcclOperation::~NcclOperation() {
  events_->give_back(start_);
  events_->give_back(end_);
}

void NcclOperation::record_start(CUstream_st* caller) {
  caller_ = caller;
  require_cuda_success(cudaEventRecord(start_, caller), name_, "record an event");
}

void NcclOperation::record_end(CUstream_st* stream) {
  require_cuda_success(cudaEventRecord(end_, stream), name_, "record an event");
  phase_.store(Phase::enqueued, std::memory_order_release);
}

void NcclOperation::wait_on(CUstream_st* stream) {
  require<Error>(phase_.load(std::memory_order_acquire) == Phase::enqueued, name_,
                 " belongs to a group that has not ended, so that it cannot be waited for");
  refuse_captured_stream(stream, name_);
  make_stream_wait(stream, end_, name_);
  // The caller's stream is the one for which the tensors were made, or to which they were handed over: memory
  // freed from now on is used again behind the wait. Another stream's wait says nothing about that one; then
  // the watchdog lets go of the tensors once the operation is done.
  if (stream == caller_) release();
}

bool NcclOperation::is_done() const {
  return phase_.load(std::memory_order_acquire) == Phase::enqueued && has_event_passed(end_, name_);
}

void NcclOperation::look(Clock::time_point now) {
  const Phase phase = phase_.load(std::memory_order_acquire);
  is_over_ = phase == Phase::given_up || (phase == Phase::enqueued && has_event_passed(end_, name_));
  if (!is_over_ && !has_started_ && has_event_passed(start_, name_)) {
    has_started_ = true;
    started_ = now;
  }
}

NcclOperation::Clock::duration NcclOperation::age(Clock::time_point now) const {
  if (phase_.load(std::memory_order_acquire) == Phase::being_enqueued) return now - called_;
  return has_started_ ? now - started_ : Clock::duration::zero();
}

void NcclOperation::release() noexcept {
  std::vector<at::Tensor> released;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  released.swap(tensors_);
}

}  // namespace pacer::detail
