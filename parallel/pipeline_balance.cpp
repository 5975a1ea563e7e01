#include <pacer/parallel/pipeline_balance.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/random_state.h>

namespace pacer {
namespace {

constexpr int kPasses = 4;  // the first does not count

void synchronize(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Forward and backward once. What the block returns, without its graph.
Tensors pass(const std::function<Tensors(size_t, const Tensors&)>& forward, size_t i, const Tensors& inputs) {
  Tensors x;
  for (const at::Tensor& input : inputs) {
    x.push_back(input.detach());
    if (at::isFloatingType(input.scalar_type())) x.back().requires_grad_();
  }
  const Tensors y = forward(i, x);
  Tensors outputs, gradients, values;
  for (const at::Tensor& output : y) {
    values.push_back(output.detach());
    if (!output.requires_grad()) continue;
    outputs.push_back(output);
    gradients.push_back(at::ones_like(output));
  }
  if (!outputs.empty()) torch::autograd::backward(outputs, gradients);
  return values;
}

}  // namespace

std::vector<double> time_blocks(const Blocks& blocks,
                                const std::function<Tensors(size_t i, const Tensors& x)>& forward,
                                Tensors sample, Communicator& world) {
  require(!blocks.is_empty() && blocks->size() > 0, "time_blocks was given Blocks without a block");
  require(!sample.empty() && sample.front().defined(),
          "time_blocks needs a sample: the tensors that the first block takes");
  const at::Device device = world.device();
  const c10::DeviceGuard on_device(device);
  const auto random = detail::get_random_state(device);
  at::Tensor seconds = at::empty({static_cast<int64_t>(blocks->size())}, at::kDouble);
  for (at::Tensor& tensor : sample) tensor = tensor.to(device);
  for (size_t i = 0; i < blocks->size(); ++i) {
    const auto block = blocks->ptr(i);
    const auto parameters = block->parameters();
    const at::Device before = parameters.empty() ? device : parameters.front().device();
    if (before != device) block->to(device);
    double least = std::numeric_limits<double>::infinity();
    Tensors result;
    for (int k = 0; k < kPasses; ++k) {
      synchronize(device);
      const auto start = std::chrono::steady_clock::now();
      result = pass(forward, i, sample);
      synchronize(device);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (k > 0) least = std::min(least, taken.count());
    }
    block->zero_grad();
    if (before != device) block->to(before);
    seconds.mutable_data_ptr<double>()[i] = least;
    sample = std::move(result);
  }
  detail::set_random_state(device, random);
  const at::Tensor shared = seconds.to(device);
  world.broadcast(shared).wait();
  seconds = shared.cpu();
  return {seconds.const_data_ptr<double>(), seconds.const_data_ptr<double>() + seconds.numel()};
}

}  // namespace pacer
