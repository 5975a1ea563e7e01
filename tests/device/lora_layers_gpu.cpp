// Adapters of embeddings and convolutions, and DoRA, on a GPU: the CPU's results and gradients, merged weights,
// and nothing that waits for the device.
#include "support/catch.h"

#include <torch/autograd.h>

#include <pacer/hooks/hooks.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/all.h>

#include "support/both_devices.h"
#include "support/no_waiting.h"

namespace pacer::testing::lora_layers_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);

// indices [N, L] -> [N, 8, L].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    table = register_module("table", modules::Embedding(torch::nn::EmbeddingOptions(50, 64).padding_idx(3)));
    mix = register_module("mix", modules::Linear(64, 16));
    conv = register_module("conv", modules::Conv1d(torch::nn::Conv1dOptions(16, 8, 3).padding(1).groups(2)));
  }
  Tensor forward(const Tensor& x) { return conv(mix(table(x)).tanh().transpose(1, 2)); }
  modules::Embedding table = nullptr;
  modules::Linear mix = nullptr;
  modules::Conv1d conv = nullptr;
};
TORCH_MODULE(Net);

// The same numbers on every device: two adapters of each layer, or one of the linear layer with DoRA.
Net adapted(at::Device device, bool with_dora) {
  torch::manual_seed(7);
  Net net;
  if (with_dora) {
    modules::add_lora(*net, modules::LoraOptions(4).alpha(6).dora(true).targets({"mix"}));
  } else {
    modules::add_lora(*net, modules::LoraOptions(4).alpha(6).targets({"*"}).name("a"));
    modules::add_lora(*net, modules::LoraOptions(2).targets({"*"}).name("b"));
    modules::set_adapters(*net, {"a", "b"});
  }
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*net)) item.value().add_(torch::randn_like(item.value()), 0.2);
  }
  net->to(device);
  return net;
}

Tensor indices(at::Device device) {
  torch::manual_seed(8);
  return torch::randint(50, {6, 10}).to(device);
}

double relative_error(const Tensor& found, const Tensor& wanted) {
  const Tensor a = found.detach().cpu(), b = wanted.detach().cpu();
  return ((a - b).norm() / b.norm()).item<double>();
}

}  // namespace

TEST_CASE("on a GPU adapters of all layers compute what they compute on the CPU", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const bool with_dora : {false, true}) {
    CAPTURE(with_dora);
    Net cpu = adapted(at::kCPU, with_dora), gpu = adapted(kGpu, with_dora);
    for (Net* net : {&cpu, &gpu}) (*net)->to(at::kDouble);
    const Tensor wanted = cpu(indices(at::kCPU)), found = gpu(indices(kGpu));
    CHECK(relative_error(found, wanted) < 1e-12);
    const auto of_cpu = torch::autograd::grad({wanted.square().sum()}, modules::trainable(*cpu).values());
    const auto of_gpu = torch::autograd::grad({found.square().sum()}, modules::trainable(*gpu).values());
    for (size_t i = 0; i < of_cpu.size(); ++i) {
      CAPTURE(i);
      CHECK(relative_error(of_gpu[i], of_cpu[i]) < 1e-10);
    }
    if (with_dora) {
      const Tensor before = gpu->mix->weight.detach().clone();
      modules::merge(*gpu);
      CHECK(relative_error(gpu(indices(kGpu)), wanted) < 1e-7);
      modules::unmerge(*gpu);
      CHECK(gpu->mix->weight.equal(before));
    }
  }
}

TEST_CASE("a step over adapters of all layers never waits for the GPU", "[gpu][lora]") {
  PACER_NEEDS_GPU();
  for (const bool with_dora : {false, true}) {
    CAPTURE(with_dora);
    Net net = adapted(kGpu, with_dora);
    if (with_dora) modules::quantize(*net, modules::Nf4Options().targets({"mix"}));
    FusedAdamW optimizer(modules::trainable(*net), FusedAdamWOptions(1e-3));
    Session session(*net, optimizer);
    session.use(GradientClipping(1.0)).use(Precision::bf16());
    const Tensor data = indices(kGpu);
    const auto step = [&] {
      auto [x] = session.begin(data);
      session.backward(net(x).to(at::kFloat).square().mean());
      session.step();
    };
    for (int i = 0; i < 3; ++i) step();
    const std::vector<Tensor> before = [&] {
      std::vector<Tensor> values;
      for (const auto& item : modules::trainable(*net)) values.push_back(item.value().detach().clone());
      return values;
    }();
    {
      const NoWaiting no_waiting;
      for (int i = 0; i < 3; ++i) step();
    }
    size_t next = 0;
    for (const auto& item : modules::trainable(*net)) {
      CAPTURE(item.key());
      CHECK_FALSE(item.value().equal(before[next++]));
    }
    session.finish();
  }
}

}  // namespace pacer::testing::lora_layers_gpu
