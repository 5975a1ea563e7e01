// One optimizer on the CPU and its twin on the GPU, over the same odd parameters.
#pragma once

#include <string>
#include <vector>

#include <torch/cuda.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {

#define PACER_NEEDS_GPU() \
  if (!torch::cuda::is_available()) PACER_SKIP("no NVIDIA GPU")

// The same values on a GPU, in the same strides, gaps and alignment.
inline Tensor moved_to(const Tensor& tensor, at::Device device) {
  int64_t extent = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && extent > 0; ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  const int64_t offset = tensor.storage_offset();
  const Tensor memory = torch::empty({extent + offset}, tensor.options().device(device).requires_grad(false));
  return memory.as_strided(tensor.sizes(), tensor.strides(), offset)
      .copy_(tensor.detach())
      .detach()
      .requires_grad_();
}

inline std::vector<Tensor> moved_to(const std::vector<Tensor>& tensors, at::Device device = at::kCUDA) {
  std::vector<Tensor> moved;
  for (const Tensor& tensor : tensors) moved.push_back(moved_to(tensor, device));
  return moved;
}

// Small and large, aligned and not, dense, transposed and with gaps, and an empty one.
inline std::vector<Tensor> odd_parameters(at::ScalarType dtype) {
  const auto random = [&](std::vector<int64_t> shape) { return torch::randn(shape, at::kDouble).to(dtype); };
  std::vector<Tensor> parameters = {random({}),
                                    random({5}),
                                    random({0, 3}),
                                    random({70001}),
                                    random({1}),
                                    random({300, 129}).t(),
                                    random({41}).slice(0, 1),
                                    random({6, 8}).slice(1, 2, 5),
                                    random({33, 64}),
                                    random({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)};
  for (Tensor& parameter : parameters) parameter = parameter.detach().requires_grad_();
  return parameters;
}

// The same optimizer on both devices.
template <class Optimizer>
struct BothDevices {
  std::vector<Tensor> cpu, gpu;
  Optimizer on_cpu, on_gpu;

  BothDevices(const std::vector<Tensor>& parameters, const OptionsOf<Optimizer>& options)
      : cpu(parameters), gpu(moved_to(parameters)), on_cpu(cpu, options), on_gpu(gpu, options) {}

  void set_gradients() { set_random_gradients(cpu, gpu); }
  void clear_gradient(size_t i) { cpu[i].mutable_grad() = gpu[i].mutable_grad() = Tensor(); }
  void set_lr(double lr) {
    options_of(on_cpu).lr(lr);
    options_of(on_gpu).lr(lr);
  }
  void step() {
    on_cpu.step();
    on_gpu.step();
  }
  std::string differs() { return difference(snapshot(on_cpu), snapshot(on_gpu)); }
};

}  // namespace pacer::testing
