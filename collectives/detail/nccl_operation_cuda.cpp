// CUDA events around operations, and the thread that looks after them: asleep while there are none, else
// awake a few times a second. Errors of CUDA are one sentence here; a query that is not done yet leaves no
// error behind.
#include <pacer/collectives/detail/nccl_operation.h>

#if PACER_WITH_NCCL

#include <algorithm>
#include <thread>
#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr std::chrono::milliseconds kLookInterval{50};
// From what age on an operation is a reason to ask about trouble, and how often.
constexpr std::chrono::milliseconds kTroubleAge{1000};

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

// One question, asked by a thread of its own: the answer may have to come from a host that has stopped, and
// deadlines must not wait for that.
struct NcclWatchdog::Inquiry {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::optional<std::string> answer;
};

NcclWatchdog::NcclWatchdog(std::shared_ptr<NcclComm> comm, NcclTrouble trouble)
    : comm_(std::move(comm)), trouble_(std::move(trouble)) {}

std::shared_ptr<NcclWatchdog> NcclWatchdog::start(std::shared_ptr<NcclComm> comm, NcclTrouble trouble) {
  auto watchdog = std::make_shared<NcclWatchdog>(std::move(comm), std::move(trouble));
  std::thread([watchdog] { watchdog->run(); }).detach();
  return watchdog;
}

void NcclWatchdog::add(std::shared_ptr<NcclOperation> operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  operations_.push_back(std::move(operation));
  if (operations_.size() == 1) changed_.notify_all();
}

bool NcclWatchdog::wait_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return operations_.empty() || has_stopped_; }) &&
         !comm_->has_failed();
}

void NcclWatchdog::stop(std::chrono::milliseconds limit) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, limit, [this] { return has_stopped_; });
}

void NcclWatchdog::run() {
  cudaSetDevice(comm_->device().index());
  // Otherwise asking for an event would break the capture of a CUDA graph in another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  cudaThreadExchangeStreamCaptureMode(&mode);
  try {
    for (Operations watched; sleep(watched);) {
      watch(watched);
      comm_->poll();
      forget_over();
    }
  } catch (const std::exception& error) {
    comm_->fail(error.what(), false);  // CUDA has failed
  }
  if (comm_->has_failed()) {
    comm_->wait_ended();  // before that the device may still write to the tensors
  }
  if (inquiry_ != nullptr) {  // may use what its owner takes apart next
    std::unique_lock<std::mutex> lock(inquiry_->mutex);
    inquiry_->changed.wait_for(lock, kTroubleAge, [this] { return inquiry_->is_done; });
  }
  Operations last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last.swap(operations_);
    has_stopped_ = true;
    changed_.notify_all();
  }
  for (const auto& operation : last) operation->release();
}

// Until there is something to look at. False where there will be nothing any more.
bool NcclWatchdog::sleep(Operations& watched) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!operations_.empty()) changed_.wait_for(lock, kLookInterval, [this] { return is_stopping_; });
  changed_.wait(lock, [this] { return is_stopping_ || !operations_.empty(); });
  if (is_stopping_ || comm_->has_failed()) return false;
  watched = operations_;
  return true;
}

void NcclWatchdog::watch(const Operations& watched) {
  const Clock::time_point now = Clock::now();
  Clock::duration oldest{};
  for (const auto& operation : watched) {
    operation->look(now);
    if (operation->is_over()) {
      operation->release();
      continue;
    }
    const Clock::duration age = operation->age(now);
    if (age > operation->timeout()) {
      comm_->fail(concatenate(operation->name(), " was not done within its deadline of ",
                              operation->timeout().count(), " ms"),
                  true);
      return;
    }
    oldest = std::max(oldest, age);
  }
  if (oldest > kTroubleAge) ask_about_trouble();
}

void NcclWatchdog::forget_over() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_over = [](const std::shared_ptr<NcclOperation>& operation) { return operation->is_over(); };
  operations_.erase(std::remove_if(operations_.begin(), operations_.end(), is_over), operations_.end());
  if (operations_.empty()) changed_.notify_all();
}

void NcclWatchdog::ask_about_trouble() {
  if (inquiry_ != nullptr) {
    const std::lock_guard<std::mutex> lock(inquiry_->mutex);
    if (!inquiry_->is_done) return;
    if (inquiry_->answer.has_value()) {
      comm_->fail(*inquiry_->answer, false);
      return;
    }
  }
  if (!trouble_ || Clock::now() - last_asked_ < kTroubleAge) return;
  last_asked_ = Clock::now();
  inquiry_ = std::make_shared<Inquiry>();
  std::thread([inquiry = inquiry_, trouble = trouble_] {
    std::optional<std::string> answer;
    try {
      answer = trouble();
    } catch (const std::exception&) {  // nobody to ask: the deadline is left
    }
    const std::lock_guard<std::mutex> lock(inquiry->mutex);
    inquiry->answer = std::move(answer);
    inquiry->is_done = true;
    inquiry->changed.notify_all();
  }).detach();
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
