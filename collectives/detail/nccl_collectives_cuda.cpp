// What NCCL is asked for, operation by operation. Sums need a dtype that NCCL can add; everything else moves
// bytes. Counts are 64-bit all the way.
#include <pacer/collectives/detail/nccl_transport.h>

#if PACER_WITH_NCCL

#include <numeric>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

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

// Where in memory each rank's chunk begins, in bytes.
std::vector<size_t> nccl_offsets(const std::vector<int64_t>& counts, size_t element_size) {
  std::vector<size_t> offsets(counts.size(), 0);
  for (size_t i = 1; i < counts.size(); ++i) {
    offsets[i] = offsets[i - 1] + static_cast<size_t>(counts[i - 1]) * element_size;
  }
  return offsets;
}

}  // namespace

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
  return exchange(NcclScope::world, output, output_counts, input, input_counts, timeout);
}

TransportWorkPtr NcclTransport::all_to_all_in_node(const at::Tensor& output,
                                                   const std::vector<int64_t>& output_counts,
                                                   const at::Tensor& input,
                                                   const std::vector<int64_t>& input_counts,
                                                   Milliseconds timeout) {
  const NcclScope scope = comm_->has_node() ? NcclScope::node : NcclScope::world;
  return exchange(scope, output, output_counts, input, input_counts, timeout);
}

TransportWorkPtr NcclTransport::exchange(NcclScope scope, const at::Tensor& output,
                                         const std::vector<int64_t>& output_counts, const at::Tensor& input,
                                         const std::vector<int64_t>& input_counts, Milliseconds timeout) {
  const RankPlace& place = comm_->place();
  const size_t rank = static_cast<size_t>(place.rank), world = static_cast<size_t>(place.world_size);
  require(output_counts.size() == world && input_counts.size() == world &&
              input_counts[rank] == output_counts[rank],
          "all_to_all needs one count a rank, and the same for what a rank sends itself on both sides");
  const size_t element_size = input.element_size();
  const auto from = static_cast<const char*>(input.const_data_ptr());
  const auto to = static_cast<char*>(output.mutable_data_ptr());
  const std::vector<size_t> from_at = nccl_offsets(input_counts, element_size);
  const std::vector<size_t> to_at = nccl_offsets(output_counts, element_size);
  // The ranks that take part: so many, from the first one on.
  const size_t size = scope == NcclScope::node ? static_cast<size_t>(place.ranks_per_node) : world;
  const size_t first = rank / size * size;
  CUstream_st* const s = stream();
  const NcclCall call = [=](ncclComm* comm) {
    const size_t own_bytes = static_cast<size_t>(input_counts[rank]) * element_size;
    if (own_bytes != 0 && cudaMemcpyAsync(to + to_at[rank], from + from_at[rank], own_bytes,
                                          cudaMemcpyDeviceToDevice, s) != cudaSuccess) {
      return ncclUnhandledCudaError;
    }
    ncclResult_t result = ncclGroupStart();
    for (size_t i = 1; i < size && !is_nccl_error(result); ++i) {  // not all to the first one first
      const size_t receiver = (rank - first + i) % size, sender = (rank - first + size - i) % size;
      const size_t sent = static_cast<size_t>(input_counts[first + receiver]) * element_size;
      const size_t received = static_cast<size_t>(output_counts[first + sender]) * element_size;
      if (sent != 0) {
        result =
            ncclSend(from + from_at[first + receiver], sent, ncclUint8, static_cast<int>(receiver), comm, s);
      }
      if (received != 0 && !is_nccl_error(result)) {
        result = ncclRecv(to + to_at[first + sender], received, ncclUint8, static_cast<int>(sender), comm, s);
      }
    }
    const ncclResult_t end = ncclGroupEnd();
    return is_nccl_error(result) ? result : end;
  };
  return start("all_to_all", {output, input}, timeout, call, scope);
}

TransportWorkPtr NcclTransport::broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) {
  void* const data = tensor.mutable_data_ptr();
  const size_t bytes = nccl_bytes(tensor);
  CUstream_st* const s = stream();
  return start("broadcast", {tensor}, timeout,
               [=](ncclComm* comm) { return ncclBroadcast(data, data, bytes, ncclUint8, root, comm, s); });
}

TransportWorkPtr NcclTransport::send(const at::Tensor& tensor, int to, Milliseconds timeout) {
  const void* const data = tensor.const_data_ptr();
  const size_t bytes = nccl_bytes(tensor);
  CUstream_st* const s = stream();
  return start("send", {tensor}, timeout,
               [=](ncclComm* comm) { return ncclSend(data, bytes, ncclUint8, to, comm, s); });
}

TransportWorkPtr NcclTransport::receive(const at::Tensor& tensor, int from, Milliseconds timeout) {
  void* const data = tensor.mutable_data_ptr();
  const size_t bytes = nccl_bytes(tensor);
  CUstream_st* const s = stream();
  return start("receive", {tensor}, timeout,
               [=](ncclComm* comm) { return ncclRecv(data, bytes, ncclUint8, from, comm, s); });
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
