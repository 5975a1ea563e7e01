// Adapters and weights in 4 bits on a GPU: the CPU's codes to the byte, its results within what products on
// either device lose, nothing that waits for the device, and captured graphs.
#include "support/catch.h"

#include <sstream>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/serialize.h>

#include <pacer/checkpoints/all.h>
#include <pacer/core/error.h>
#include <pacer/hooks/hooks.h>
#include <pacer/metrics/all.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>

#include "support/both_devices.h"
#include "support/modules/autocast.h"
#include "support/no_waiting.h"

namespace pacer::testing::lora_gpu {
namespace {

using Catch::Matchers::ContainsSubstring;

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kRows = 96, kIn = 128, kOut = 80;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", modules::Linear(kIn, kOut));
    gate = register_module("gate", modules::Linear(torch::nn::LinearOptions(kIn, kOut).bias(false)));
    down = register_module("down", modules::Linear(kOut, kIn));
  }
  Tensor forward(const Tensor& x) {
    const std::vector<Tensor> parts = modules::forward_together(x, {up, gate});
    return down(parts[0].tanh() * parts[1]);
  }
  modules::Linear up = nullptr, gate = nullptr, down = nullptr;
};
TORCH_MODULE(Net);

modules::Nf4Options all_layers(bool doubly = true) {
  return modules::Nf4Options().targets({"up", "gate", "down"}).double_quantization(doubly);
}

// The same numbers on every device; adapters in fp32, the rest in `dtype`, or in 4 bits made of that.
Net adapted(at::Device device, at::ScalarType dtype, bool in_4_bits, double dropout = 0) {
  torch::manual_seed(7);
  Net net;
  net->to(dtype);
  if (in_4_bits) modules::quantize(*net, all_layers());
  modules::add_lora(*net, modules::LoraOptions(5).alpha(10).dropout(dropout).targets({"up", "gate", "down"}));
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*net)) item.value().normal_(0, 0.1);
  }
  net->to(device);
  return net;
}

double relative_error(const Tensor& found, const Tensor& wanted) {
  const Tensor a = found.detach().cpu().to(at::kDouble), b = wanted.detach().cpu().to(at::kDouble);
  return ((a - b).norm() / b.norm()).item<double>();
}

Tensor input(at::Device device, at::ScalarType dtype) {
  torch::manual_seed(8);
  return torch::randn({kRows, kIn}).to(dtype).to(device).requires_grad_();
}

// Of x and of everything that is trained.
std::vector<Tensor> gradients(Net& net, const Tensor& x, const Tensor& y) {
  std::vector<Tensor> inputs = {x};
  for (const auto& item : modules::trainable(*net)) inputs.push_back(item.value());
  torch::manual_seed(9);
  const Tensor dy = torch::randn({kRows, kIn}).to(y.scalar_type()).to(y.device());
  return torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/false, /*create_graph=*/false);
}

}  // namespace

TEST_CASE("on a GPU adapted layers compute what they compute on the CPU", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool in_4_bits : {false, true}) {
      CAPTURE(dtype, in_4_bits);
      Net cpu = adapted(at::kCPU, dtype, in_4_bits), gpu = adapted(kGpu, dtype, in_4_bits);
      const Tensor x = input(at::kCPU, dtype), twin = input(kGpu, dtype);
      const Tensor wanted = cpu(x), found = gpu(twin);
      CHECK(found.scalar_type() == dtype);
      // fp32 without TF32: sums of up to 128 products in another order, a few units of 2^-24 each. bf16:
      // three layers and the passes between them round to 8 bits (2^-9 each), and the CPU's products may do
      // so more often.
      const double bound = dtype == at::kFloat ? 1e-5 : 0.02;
      CHECK(relative_error(found, wanted) < bound);
      const auto of_cpu = gradients(cpu, x, wanted), of_gpu = gradients(gpu, twin, found);
      REQUIRE(of_cpu.size() == 7);
      for (size_t i = 0; i < of_cpu.size(); ++i) {
        CAPTURE(i);
        CHECK(of_gpu[i].scalar_type() == (i == 0 ? dtype : at::kFloat));
        CHECK(relative_error(of_gpu[i], of_cpu[i]) < 2 * bound);
      }
    }
  }
}

TEST_CASE("on a GPU weights are put in 4 bits and decoded as on the CPU, to the byte", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool doubly : {false, true}) {
      CAPTURE(dtype, doubly);
      torch::manual_seed(3);
      Net cpu;
      cpu->to(dtype);
      torch::manual_seed(3);
      Net gpu;
      gpu->to(dtype);
      gpu->to(kGpu);
      modules::quantize(*cpu, all_layers(doubly));
      modules::quantize(*gpu, all_layers(doubly));
      const auto wanted = cpu->named_buffers();
      REQUIRE(wanted.size() == (doubly ? 15U : 6U));
      for (const auto& item : gpu->named_buffers()) {
        CAPTURE(item.key());
        CHECK(item.value().is_cuda());
        CHECK(item.value().cpu().equal(wanted[item.key()]));
      }
      for (const at::ScalarType to : {at::kFloat, at::kBFloat16, at::kHalf}) {
        CHECK(gpu->up->nf4()->decode(to).cpu().equal(cpu->up->nf4()->decode(to)));
      }
      // What the layer's node multiplies by: rows of the unit matrix give it as it is.
      const Tensor x = torch::eye(kIn, at::TensorOptions(kGpu).dtype(dtype));
      CHECK(gpu->gate(x).equal(gpu->gate->nf4()->decode(dtype).t()));
      modules::dequantize(*gpu);
      CHECK(gpu->up->weight.cpu().equal(cpu->up->nf4()->decode(dtype)));
    }
  }
}

TEST_CASE("a model in 4 bits moves to a GPU and back, and through an archive", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  Net net = adapted(at::kCPU, at::kFloat, true);
  const Tensor x = input(at::kCPU, at::kFloat);
  const Tensor before = net(x).detach();
  std::vector<Tensor> buffers;
  for (const Tensor& buffer : net->buffers()) buffers.push_back(buffer.clone());
  net->to(kGpu);
  for (const auto& tensors : {net->parameters(), net->buffers()}) {
    for (const Tensor& tensor : tensors) CHECK(tensor.is_cuda());
  }
  std::stringstream file;
  torch::save(net, file);
  const auto copy = std::dynamic_pointer_cast<modules::LinearImpl>(net->up->clone(at::Device(at::kCPU)));
  CHECK(copy->nf4()->codes.is_cpu());
  CHECK(copy->adapter("default")->A.is_cpu());
  Net other = adapted(at::kCPU, at::kFloat, true);
  for (const Tensor& buffer : other->buffers()) buffer.detach().zero_();
  torch::load(other, file, at::Device(at::kCPU));
  net->to(at::kCPU);
  for (size_t i = 0; i < buffers.size(); ++i) CHECK(net->buffers()[i].equal(buffers[i]));
  CHECK(net(x).equal(before));
  CHECK(other(x).equal(before));
}

TEST_CASE("a step over adapters and 4 bits never waits for the GPU", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const bool in_16_bits : {false, true}) {
    Net net = adapted(kGpu, at::kFloat, true, /*dropout=*/0.1);
    FusedAdamW optimizer(modules::trainable(*net), FusedAdamWOptions(1e-3));
    Session session(*net, optimizer);
    session.use(GradientClipping(1.0));
    if (in_16_bits) session.use(Precision::bf16());
    const Tensor data = input(kGpu, at::kFloat).detach();
    const auto step = [&] {
      auto [x] = session.begin(data);
      session.backward(net(x).square().mean());
      session.step();
    };
    for (int i = 0; i < 3; ++i) step();
    {
      const NoWaiting no_waiting;
      for (int i = 0; i < 20; ++i) step();
    }
    session.finish();
  }
}

TEST_CASE("forward and backward over 4 bits can be captured without dropout, and with it are refused",
          "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const double dropout : {0.0, 0.25}) {
    CAPTURE(dropout);
    Net net = adapted(kGpu, at::kBFloat16, true, dropout);
    const Tensor x = input(kGpu, at::kBFloat16);
    Tensor y;
    std::vector<Tensor> found;
    const auto pass = [&] {
      y = net(x);
      std::vector<Tensor> inputs = {x};
      for (const auto& item : modules::trainable(*net)) inputs.push_back(item.value());
      found = torch::autograd::grad({y.sum()}, inputs);
    };
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard guard(stream);
    for (int i = 0; i < 3; ++i) pass();  // workspaces of products
    stream.synchronize();
    at::cuda::CUDAGraph graph;
    std::string message;
    graph.capture_begin();
    try {
      pass();
    } catch (const Error& error) {
      message = error.what();
    }
    graph.capture_end();
    if (dropout > 0) {
      CHECK_THAT(message, ContainsSubstring("dropout in a captured CUDA graph"));
      continue;
    }
    CHECK(message.empty());
    // Other numbers in the same places.
    {
      const torch::NoGradGuard no_grad;
      x.mul_(-0.5);
      for (const auto& item : modules::trainable(*net)) item.value().mul_(1.5);
    }
    graph.replay();
    const Tensor replayed = y.clone();
    std::vector<Tensor> of_graph;
    for (const Tensor& gradient : found) of_graph.push_back(gradient.clone());
    pass();
    CHECK(replayed.equal(y));
    for (size_t i = 0; i < found.size(); ++i) CHECK(of_graph[i].equal(found[i]));
  }
}

TEST_CASE("on a GPU dropout of adapters drops what it drops on the CPU", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  Net cpu = adapted(at::kCPU, at::kFloat, true, 0.5), gpu = adapted(kGpu, at::kFloat, true, 0.5);
  const Tensor x = input(at::kCPU, at::kFloat), twin = input(kGpu, at::kFloat);
  torch::manual_seed(31);
  const Tensor wanted = cpu(x);
  torch::manual_seed(31);
  const Tensor found = gpu(twin);
  CHECK(relative_error(found, wanted) < 1e-5);
  CHECK(relative_error(gradients(gpu, twin, found)[1], gradients(cpu, x, wanted)[1]) < 2e-5);
}

}  // namespace pacer::testing::lora_gpu
