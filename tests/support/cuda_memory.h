// GPU memory, streams and error checks for the device tests. Every wrapper waits for the GPU, so that an
// error is reported where it was made. No LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>

namespace pacer::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline bool has_gpu() {
  int devices = 0;
  const bool found = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  if (!found) cudaGetLastError();  // not to be taken for the error of a later launch
  return found;
}

// Waits for the GPU and throws on any error so far, of a launch or of its execution.
inline void synchronize() {
  check_cuda(cudaGetLastError(), "a launch");
  check_cuda(cudaDeviceSynchronize(), "a kernel");
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return bytes_; }

  void upload(const void* source, size_t bytes, size_t offset = 0) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpy(data() + offset, source, bytes, cudaMemcpyHostToDevice), "an upload");
    check_cuda(cudaDeviceSynchronize(), "an upload");  // from pageable memory it may return before it is done
  }
  void download(void* target, size_t bytes, size_t offset = 0) const {
    if (bytes > 0)
      check_cuda(cudaMemcpy(target, data() + offset, bytes, cudaMemcpyDeviceToHost), "a download");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// A vector's copy on the GPU.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values)
      : count_(values.size()), memory_(values.size() * sizeof(T)) {
    set(values);
  }
  void set(const std::vector<T>& values) { memory_.upload(values.data(), count_ * sizeof(T)); }
  void set(size_t i, const T& value) { memory_.upload(&value, sizeof(T), i * sizeof(T)); }
  std::vector<T> get() const {
    std::vector<T> values(count_);
    memory_.download(values.data(), count_ * sizeof(T));
    return values;
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  size_t count_;
  DeviceMemory memory_;
};

class CudaStream {
 public:
  CudaStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `enqueue(stream)` puts on a stream, recorded once and replayed at will.
class CapturedGraph {
 public:
  template <class Enqueue>
  CapturedGraph(const CudaStream& stream, const Enqueue& enqueue) {
    check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "the begin of a capture");
    enqueue(stream.get());
    check_cuda(cudaStreamEndCapture(stream.get(), &graph_), "the end of a capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~CapturedGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void replay(const CudaStream& stream) const {
    check_cuda(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch");
    synchronize();
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace pacer::testing
