// The thread that looks after operations: asleep while there are none, else awake a few times a second.
#include <pacer/collectives/detail/nccl_watchdog.h>

#if PACER_WITH_NCCL

#include <algorithm>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr std::chrono::milliseconds kLookInterval{50};
// From what age on an operation is a reason to ask about trouble, and how often.
constexpr std::chrono::milliseconds kTroubleAge{1000};

}  // namespace

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
