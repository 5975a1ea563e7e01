// A TorchScript module on a GPU in a Session: the bits of a loop without one, and a resumed run's.
#include <string>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <pacer/pacer.h>

#include "support/both_devices.h"
#include "support/catch.h"
#include "support/temporary_folder.h"

namespace pacer::testing::script_module_gpu {
namespace {

torch::jit::Module make_net() {
  torch::manual_seed(1);
  torch::jit::Module net("Net");
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_parameter("weight", torch::randn({8, 3}).requires_grad_(), /*is_buffer=*/false);
  net.register_parameter("last", torch::randn({2, 8}).requires_grad_(), /*is_buffer=*/false);
  net.register_buffer("mean", torch::zeros({8}));
  net.define(R"(
def forward(self, x):
  x = torch.tanh(torch.linear(x, self.weight))
  if self.training:
    self.mean = self.mean * 0.9 + x.detach().mean([0]) * 0.1
  return torch.linear(x - self.mean, self.last)
)");
  net.to(at::Device(at::kCUDA, 0));
  return net;
}

Tensor batch(int64_t step) {
  return (torch::linspace(-1, 1, 12).view({4, 3}) * (1 + 0.1 * static_cast<double>(step % 5))).cuda();
}
Tensor loss_of(const Tensor& output) { return (output - 0.5).square().mean(); }

std::vector<Tensor> all_tensors(const torch::jit::Module& net) {
  std::vector<Tensor> all;
  for (const auto& tensor : net.parameters()) all.push_back(tensor.detach().cpu());
  for (const auto& tensor : net.buffers()) all.push_back(tensor.cpu());
  return all;
}

std::vector<Tensor> train(int64_t steps, const std::string& folder) {
  const auto net = make_net();
  const auto model = modules::script_module(net);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(model, optimizer);
  session.use(Checkpoints(CheckpointsOptions(folder).every(2)));
  for (int64_t step = session.resume().value_or(0); step < steps; ++step) {
    auto [x] = session.begin(batch(step));
    session.backward(loss_of(model->forward(x)));
    session.step();
  }
  session.finish();
  return all_tensors(net);
}

}  // namespace

TEST_CASE("a TorchScript module on a GPU trains in a Session, and goes on to the bit", "[script][gpu]") {
  PACER_NEEDS_GPU();
  const torch::jit::GraphOptimizerEnabledGuard as_written(false);
  const TemporaryFolder folder;
  auto by_hand = make_net();
  std::vector<Tensor> parameters;
  for (const auto& parameter : by_hand.parameters()) parameters.push_back(parameter);
  FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01));
  for (int64_t step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    loss_of(by_hand.forward({batch(step)}).toTensor()).backward();
    optimizer.step();
  }
  const std::vector<Tensor> wanted = all_tensors(by_hand);
  CHECK(same_bits(train(10, folder.path("whole")), wanted));
  (void)train(4, folder.path("stopped"));
  CHECK(same_bits(train(10, folder.path("stopped")), wanted));
}

}  // namespace pacer::testing::script_module_gpu
