// The order of things around each call of NCCL: start event, watchdog, NCCL, end event.
#include <pacer/collectives/detail/nccl_transport.h>

#if PACER_WITH_NCCL

#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// How long the destructor lets operations end by themselves, and how long it waits for its own thread.
constexpr std::chrono::milliseconds kNcclIdleLimit{2000};
constexpr std::chrono::milliseconds kNcclCloseLimit{2500};
constexpr std::chrono::milliseconds kNcclStopLimit{500};

class NcclWork final : public TransportWork {
 public:
  NcclWork(std::shared_ptr<NcclComm> comm, std::shared_ptr<NcclOperation> operation)
      : comm_(std::move(comm)), operation_(std::move(operation)) {}

  // Dropped without wait(): the watchdog keeps operation and tensors until they are done. There is nothing to
  // wait for, and no stream that would be the right one to wait.
  ~NcclWork() override = default;

  void wait() override {
    comm_->check();
    const c10::cuda::CUDAGuard guard(comm_->device());
    operation_->wait_on(c10::cuda::getCurrentCUDAStream(comm_->device().index()).stream());
  }

  bool is_done() override {
    if (comm_->has_failed()) return true;
    try {
      return operation_->is_done();
    } catch (const std::exception&) {
      return true;  // wait() meets the same error of CUDA
    }
  }

 private:
  const std::shared_ptr<NcclComm> comm_;
  const std::shared_ptr<NcclOperation> operation_;
};

}  // namespace

NcclTransport::NcclTransport(std::shared_ptr<NcclComm> comm, std::string name, NcclTrouble trouble)
    : comm_(std::move(comm)),
      name_(std::move(name)),
      device_(comm_->device()),
      // Of the pool, not made here: tensors and cached memory may refer to it after this transport has gone.
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index()).unwrap()),
      events_(std::make_shared<CudaEventPool>(device_)),
      watchdog_(NcclWatchdog::start(comm_, std::move(trouble))) {}

NcclTransport::~NcclTransport() {
  try {
    if (watchdog_->wait_idle(comm_->has_failed() ? std::chrono::milliseconds(0) : kNcclIdleLimit)) {
      comm_->close(kNcclCloseLimit);
    } else {
      comm_->fail("NCCL was shut down by this rank with operations under way", false);
      comm_->wait_ended(kNcclCloseLimit);
    }
    watchdog_->stop(kNcclStopLimit);
  } catch (const std::exception&) {  // the process is short of everything; what is left stays
  }
}

CUstream_st* NcclTransport::stream() const { return c10::cuda::CUDAStream(stream_).stream(); }

std::shared_ptr<NcclOperation> NcclTransport::prepare(const char* name, std::vector<at::Tensor> tensors,
                                                      Milliseconds timeout, bool is_watched) {
  comm_->check();
  CUstream_st* const caller = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  refuse_captured_stream(caller, name);
  auto operation = std::make_shared<NcclOperation>(name, timeout, std::move(tensors), events_);
  operation->record_start(caller);
  if (is_watched) watchdog_->add(operation);  // what follows can block
  try {
    operation->follow_caller(stream());
  } catch (...) {
    operation->give_up();
    throw;
  }
  return operation;
}

TransportWorkPtr NcclTransport::start(const char* name, std::vector<at::Tensor> tensors, Milliseconds timeout,
                                      NcclCall call, NcclScope scope) {
  const std::lock_guard<std::recursive_mutex> lock(order_);
  try {
    require<Error>(scope == NcclScope::world || !is_in_group(), name,
                   " within a node cannot be part of a group of sends and receives");
    const c10::cuda::CUDAGuard guard(device_);
    auto operation = prepare(name, std::move(tensors), timeout, /*is_watched=*/true);
    auto work = std::make_unique<NcclWork>(comm_, operation);
    if (is_in_group()) {
      group_.push_back({std::move(operation), std::move(call)});
      return work;
    }
    try {
      comm_->enqueue(name, call, scope);
      operation->record_end(stream());
    } catch (const std::exception& error) {
      comm_->fail(error.what(), false);  // the ranks have lost their common order
      throw;
    }
    return work;
  } catch (...) {
    if (is_in_group()) {
      for (const Grouped& grouped : group_) grouped.operation->give_up();
      close_group();
    }
    throw;
  }
}

void NcclTransport::begin_group() {
  require<Error>(!is_in_group(), "a group of sends and receives cannot begin inside another one");
  order_.lock();
  group_owner_ = std::this_thread::get_id();
}

void NcclTransport::close_group() {
  group_.clear();
  group_owner_ = std::thread::id();
  order_.unlock();
}

void NcclTransport::end_group() {
  if (!is_in_group()) return;  // one of its operations has thrown
  try {
    const c10::cuda::CUDAGuard guard(device_);
    // In one go, so that nothing throws, and no abort comes, between NCCL's start and end of the group.
    const NcclCall call = [this](ncclComm* comm) {
      ncclResult_t result = ncclGroupStart();
      for (const Grouped& grouped : group_) {
        if (result != ncclSuccess && result != ncclInProgress) break;
        result = static_cast<ncclResult_t>(grouped.call(comm));
      }
      const ncclResult_t end = ncclGroupEnd();
      return result != ncclSuccess && result != ncclInProgress ? result : end;
    };
    if (!group_.empty()) comm_->enqueue("a group of sends and receives", call);
    for (const Grouped& grouped : group_) grouped.operation->record_end(stream());
  } catch (const std::exception& error) {
    comm_->fail(error.what(), false);
    close_group();
    throw;
  }
  close_group();
}

TransportWorkPtr NcclTransport::run_on_stream(const std::function<void()>& f) {
  const std::lock_guard<std::recursive_mutex> lock(order_);
  require<Error>(!is_in_group(), "run_on_stream cannot be called inside a group of sends and receives");
  const c10::cuda::CUDAGuard guard(device_);
  // Not watched: the operations that f starts have deadlines of their own.
  auto operation = prepare("a chain of collectives", {}, Milliseconds(0), /*is_watched=*/false);
  {
    const c10::cuda::CUDAStreamGuard on_stream{c10::cuda::CUDAStream(stream_)};
    f();
  }
  operation->record_end(stream());
  return std::make_unique<NcclWork>(comm_, std::move(operation));
}

void NcclTransport::abort() noexcept {
  comm_->fail("NCCL was aborted by this rank", false);
  comm_->wait_ended(NcclComm::kAbortLimit);
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
