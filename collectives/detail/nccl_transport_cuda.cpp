// What NCCL is asked for, operation by operation, and the order of things around each call: start event,
// watchdog, NCCL, end event. Sums need a dtype that NCCL can add; everything else moves bytes. Counts are
// 64-bit all the way.
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

ncclDataType_t nccl_sum_type(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return ncclFloat64;
    case at::kFloat:
      return ncclFloat32;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kLong:
      return ncclInt64;
    case at::kInt:
      return ncclInt32;
    case at::kChar:
      return ncclInt8;
    case at::kByte:
      return ncclUint8;
    default:
      throw InvalidArgument(concatenate(name, ": NCCL cannot add elements of ", tensor.scalar_type()));
  }
}

size_t nccl_count(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }
size_t nccl_bytes(const at::Tensor& tensor) { return nccl_count(tensor) * tensor.element_size(); }

bool is_nccl_error(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

struct NcclChunk {
  char* data;
  size_t bytes;
};

struct NcclMessage {
  NcclChunk chunk;
  int peer;
  bool is_sent;
};

// Each rank's chunk.
std::vector<NcclChunk> nccl_chunks(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
  std::vector<NcclChunk> chunks;
  auto* next = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  for (const int64_t count : counts) {
    chunks.push_back({next, static_cast<size_t>(count) * tensor.element_size()});
    next += chunks.back().bytes;
  }
  return chunks;
}

// All of them as one.
ncclResult_t start_nccl_messages(const std::vector<NcclMessage>& messages, ncclComm* comm,
                                 CUstream_st* stream) {
  ncclResult_t result = ncclGroupStart();
  for (const auto& [chunk, peer, is_sent] : messages) {
    if (is_nccl_error(result)) break;
    if (chunk.bytes == 0) continue;
    result = is_sent ? ncclSend(chunk.data, chunk.bytes, ncclUint8, peer, comm, stream)
                     : ncclRecv(chunk.data, chunk.bytes, ncclUint8, peer, comm, stream);
  }
  const ncclResult_t end = ncclGroupEnd();
  return is_nccl_error(result) ? result : end;
}

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
                                      const NcclCall& call) {
  const std::lock_guard<std::recursive_mutex> lock(order_);
  const c10::cuda::CUDAGuard guard(device_);
  auto operation = prepare(name, std::move(tensors), timeout, /*is_watched=*/true);
  auto work = std::make_unique<NcclWork>(comm_, operation);
  try {
    comm_->enqueue(name, call);
    operation->record_end(stream());
  } catch (const std::exception& error) {
    comm_->fail(error.what(), false);  // the ranks have lost their common order
    throw;
  }
  return work;
}

TransportWorkPtr NcclTransport::run_on_stream(const std::function<void()>& f) {
  const std::lock_guard<std::recursive_mutex> lock(order_);
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

void NcclTransport::start_abort() noexcept { comm_->fail("NCCL was aborted by this rank", false); }

void NcclTransport::abort() noexcept {
  start_abort();
  comm_->wait_ended(NcclComm::kAbortLimit);
}

TransportWorkPtr NcclTransport::all_reduce(const at::Tensor& tensor, Milliseconds timeout) {
  const ncclDataType_t type = nccl_sum_type("all_reduce", tensor);
  void* const data = tensor.mutable_data_ptr();
  const size_t count = nccl_count(tensor);
  CUstream_st* const s = stream();
  return start("all_reduce", {tensor}, timeout,
               [=](ncclComm* comm) { return ncclAllReduce(data, data, count, type, ncclSum, comm, s); });
}

TransportWorkPtr NcclTransport::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                                     Milliseconds timeout) {
  struct Part {
    void* data;
    size_t count;
    ncclDataType_t type;
  };
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    const ncclDataType_t type = nccl_sum_type("all_reduce", tensor);
    parts.push_back({tensor.mutable_data_ptr(), nccl_count(tensor), type});
  }
  CUstream_st* const s = stream();
  return start("all_reduce", tensors, timeout, [parts, s](ncclComm* comm) {
    ncclResult_t result = ncclGroupStart();
    for (const Part& part : parts) {
      if (is_nccl_error(result)) break;
      result = ncclAllReduce(part.data, part.data, part.count, part.type, ncclSum, comm, s);
    }
    const ncclResult_t end = ncclGroupEnd();
    return is_nccl_error(result) ? result : end;
  });
}

TransportWorkPtr NcclTransport::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                               Milliseconds timeout) {
  const ncclDataType_t type = nccl_sum_type("reduce_scatter", input);
  const void* const from = input.const_data_ptr();
  void* const to = output.mutable_data_ptr();
  const size_t count = nccl_count(output);
  CUstream_st* const s = stream();
  return start("reduce_scatter", {output, input}, timeout,
               [=](ncclComm* comm) { return ncclReduceScatter(from, to, count, type, ncclSum, comm, s); });
}

TransportWorkPtr NcclTransport::all_gather(const at::Tensor& output, const at::Tensor& input,
                                           Milliseconds timeout) {
  const void* const from = input.const_data_ptr();
  void* const to = output.mutable_data_ptr();
  const size_t bytes = nccl_bytes(input);
  CUstream_st* const s = stream();
  return start("all_gather", {output, input}, timeout,
               [=](ncclComm* comm) { return ncclAllGather(from, to, bytes, ncclUint8, comm, s); });
}

TransportWorkPtr NcclTransport::all_to_all(const at::Tensor& output,
                                           const std::vector<int64_t>& output_counts, const at::Tensor& input,
                                           const std::vector<int64_t>& input_counts, Milliseconds timeout) {
  const auto rank = static_cast<size_t>(comm_->rank()), ranks = static_cast<size_t>(comm_->world_size());
  require(output_counts.size() == ranks && input_counts.size() == ranks &&
              input_counts[rank] == output_counts[rank],
          "all_to_all needs one count a rank, and the same for what a rank sends itself on both sides");
  const std::vector<NcclChunk> from = nccl_chunks(input, input_counts),
                               to = nccl_chunks(output, output_counts);
  std::vector<NcclMessage> messages;
  for (size_t i = 1; i < ranks; ++i) {  // not all to the first one first
    const size_t receiver = (rank + i) % ranks, sender = (rank + ranks - i) % ranks;
    messages.push_back({from[receiver], static_cast<int>(receiver), true});
    messages.push_back({to[sender], static_cast<int>(sender), false});
  }
  const NcclChunk own = from[rank], copy = to[rank];
  CUstream_st* const s = stream();
  return start("all_to_all", {output, input}, timeout, [=](ncclComm* comm) {
    if (own.bytes != 0 &&
        cudaMemcpyAsync(copy.data, own.data, own.bytes, cudaMemcpyDeviceToDevice, s) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
    return start_nccl_messages(messages, comm, s);
  });
}

TransportWorkPtr NcclTransport::broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) {
  void* const data = tensor.mutable_data_ptr();
  const size_t bytes = nccl_bytes(tensor);
  CUstream_st* const s = stream();
  return start("broadcast", {tensor}, timeout,
               [=](ncclComm* comm) { return ncclBroadcast(data, data, bytes, ncclUint8, root, comm, s); });
}

TransportWorkPtr NcclTransport::exchange(const std::vector<Message>& messages, Milliseconds timeout) {
  std::vector<NcclMessage> parts;
  std::vector<at::Tensor> tensors;
  for (const Message& message : messages) {
    const at::Tensor& tensor = message.tensor;
    // What is sent is only read, whatever the type says.
    void* const data =
        message.is_sent ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
    parts.push_back({{static_cast<char*>(data), nccl_bytes(tensor)}, message.peer, message.is_sent});
    tensors.push_back(tensor);
  }
  CUstream_st* const s = stream();
  return start("send_receive", std::move(tensors), timeout,
               [=](ncclComm* comm) { return start_nccl_messages(parts, comm, s); });
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
