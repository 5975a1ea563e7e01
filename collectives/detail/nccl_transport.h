// Ranks on GPUs, joined by NCCL: the Transport that puts operations on a stream of its own. Deadlines are the
// NcclWatchdog's, failures the NcclComm's.
//
// One high-priority stream of LibTorch's pool carries all operations, in the order of the calls. Each waits
// for what stands on the caller's current stream at the call, and ends with an event that wait() makes the
// current stream wait for. Any number of threads may call; they take turns.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include <pacer/collectives/detail/nccl_comm.h>
#include <pacer/collectives/detail/nccl_operation.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class NcclTransport final : public Transport {
 public:
  NcclTransport(std::shared_ptr<NcclComm> comm, std::string name, NcclTrouble trouble);
  // Lets operations under way end for up to 2 s, then ends NCCL, by an abort if need be; 5 s in all.
  ~NcclTransport() override;

  std::string name() const override { return name_; }
  at::Device device() const override { return device_; }

  // Sums: fp64, fp32, fp16, bf16, int64, int32, int8 and uint8. All other operations: any dtype.
  TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) override;
  TransportWorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                        Milliseconds timeout) override;
  bool coalesces() const override { return true; }
  TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  Milliseconds timeout) override;
  TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                              Milliseconds timeout) override;
  TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                              const at::Tensor& input, const std::vector<int64_t>& input_counts,
                              Milliseconds timeout) override;
  TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) override;
  TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override;

  bool has_stream() const override { return true; }
  TransportWorkPtr run_on_stream(const std::function<void()>& f) override;

  void check() override { comm_->check(); }
  void start_abort() noexcept override;
  void abort() noexcept override;

 private:
  TransportWorkPtr start(const char* name, std::vector<at::Tensor> tensors, Milliseconds timeout,
                         const NcclCall& call);
  std::shared_ptr<NcclOperation> prepare(const char* name, std::vector<at::Tensor> tensors,
                                         Milliseconds timeout, bool is_watched);
  // The same as cudaStream_t.
  CUstream_st* stream() const;

  const std::shared_ptr<NcclComm> comm_;
  const std::string name_;
  const at::Device device_;
  const c10::Stream stream_;
  const std::shared_ptr<CudaEventPool> events_;
  const std::shared_ptr<NcclWatchdog> watchdog_;

  std::recursive_mutex order_;  // held while an operation or run_on_stream() is enqueued
};

}  // namespace pacer::detail
