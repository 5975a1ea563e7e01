// TorchScript modules in a Session: the tensors of both sides are the same ones, whatever happens to either.
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::script_module {
namespace {

using modules::ScriptModule;

torch::jit::Module make_linear(const char* name, int64_t in, int64_t out) {
  torch::jit::Module linear(name);
  linear.register_parameter("weight", (torch::randn({out, in}) / 2).requires_grad_(), /*is_buffer=*/false);
  linear.register_parameter("bias", torch::zeros({out}).requires_grad_(), /*is_buffer=*/false);
  linear.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  return linear;
}

// Two layers with a normalisation between them, whose running mean is written to in place, as LibTorch's batch norm does, and
// whose count is assigned to.
torch::jit::Module make_net(uint64_t seed = 1) {
  torch::manual_seed(seed);
  torch::jit::Module net("Net");
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_module("first", make_linear("First", 3, 8));
  net.register_module("last", make_linear("Last", 8, 2));
  net.register_buffer("mean", torch::zeros({8}));
  net.register_buffer("count", torch::zeros({}, torch::kLong));
  net.define(R"(
def forward(self, x):
  x = torch.tanh(self.first.forward(x))
  if self.training:
    self.mean.mul_(0.9).add_(x.detach().mean([0]), alpha=0.1)
    self.count = self.count + 1
  return self.last.forward(x - self.mean)
def both(self, x):
  return self.forward(x), self.count
def swap(self, x):
  self.first.weight = self.first.weight * 2
  return x
)");
  return net;
}

Tensor batch(int64_t step) {
  return torch::linspace(-1, 1, 12).view({4, 3}) * (1 + 0.1 * static_cast<double>(step % 5));
}
Tensor loss_of(const Tensor& output) { return (output - 0.5).square().mean(); }

std::vector<Tensor> all_tensors(const torch::jit::Module& net) {
  std::vector<Tensor> all;
  for (const auto& tensor : net.parameters()) all.push_back(tensor.detach().clone());
  for (const auto& tensor : net.buffers()) all.push_back(tensor.clone());
  return all;
}

// Goes on from the newest checkpoint of the folder, if it has one.
void train(const torch::jit::Module& net, int64_t steps, const std::string& folder = "",
           const std::shared_ptr<Communicator>& world = nullptr) {
  const auto model = modules::script_module(net);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(model, optimizer, world);
  if (!folder.empty()) session.use(Checkpoints(CheckpointsOptions(folder).every(2)));
  for (int64_t step = folder.empty() ? 0 : session.resume().value_or(0); step < steps; ++step) {
    auto [x] = session.begin(batch(step));
    session.backward(loss_of(model->forward(x)));
    session.step();
  }
  session.finish();
}

}  // namespace

TEST_CASE("a TorchScript module trains in a Session as in a loop without one, to the bit", "[script]") {
  const auto by_hand = make_net();
  std::vector<Tensor> parameters;
  for (const auto& parameter : by_hand.parameters()) parameters.push_back(parameter);
  FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01));
  auto called = by_hand;  // shares its tensors
  for (int64_t step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    loss_of(called.forward({batch(step)}).toTensor()).backward();
    optimizer.step();
  }
  const auto net = make_net();
  const std::vector<Tensor> before = all_tensors(net);
  train(net, 12);
  CHECK_FALSE(same_bits(all_tensors(net), before));
  CHECK(same_bits(all_tensors(net), all_tensors(by_hand)));
  CHECK(net.attr("count").toTensor().item<int64_t>() == 12);
}

TEST_CASE("a TorchScript module has its names, its mode and its dtype on both sides", "[script]") {
  auto net = make_net();
  const auto model = modules::script_module(net);
  std::vector<std::string> names;
  for (const auto& parameter : model->named_parameters()) {
    names.push_back(parameter.key());
    CHECK(parameter->requires_grad());
  }
  CHECK(names == std::vector<std::string>{"first.weight", "first.bias", "last.weight", "last.bias"});
  CHECK(model->named_buffers().size() == 2);
  CHECK(model->named_modules().contains("first"));

  model->eval();
  CHECK_FALSE(net.is_training());
  (void)model->forward(batch(0));
  CHECK(model->named_buffers()["count"].item<int64_t>() == 0);
  model->train();
  (void)model->forward(batch(0));
  CHECK(model->named_buffers()["count"].item<int64_t>() == 1);
  const c10::IValue both = model->run({batch(0)}, "both");
  CHECK(both.toTuple()->elements().size() == 2);
  net.eval();  // seen by what is made of it
  CHECK_FALSE(modules::script_module(net)->is_training());

  model->to(torch::kDouble);
  CHECK(net.forward({batch(0).to(torch::kDouble)}).toTensor().scalar_type() == torch::kDouble);
}

TEST_CASE("buffers that a method assigns to have memory of their own and each other's old values",
          "[script]") {
  torch::jit::Module net("Kept");
  net.register_parameter("weight", torch::ones({1}).requires_grad_(), /*is_buffer=*/false);
  for (const char* name : {"last", "a", "b"}) net.register_buffer(name, torch::zeros({0}));
  net.define(R"(
def forward(self, x):
  self.last = x
  self.a, self.b = self.b, x.mean([0])
  y = x * self.weight
  self.last = y.detach()
  return y
def swap(self, x):
  self.a, self.b = self.b, self.a
  return x
)");
  const auto model = modules::script_module(net);
  const auto buffer = [&](const char* name) { return model->named_buffers()[name]; };
  const Tensor data = torch::arange(12, torch::kFloat).view({4, 3});
  const Tensor first = model->forward(data.narrow(0, 0, 2)), first_values = first.detach().clone();
  (void)model->forward(data.narrow(0, 2, 2));
  CHECK(same_bits(data, torch::arange(12, torch::kFloat).view({4, 3})));
  CHECK(same_bits(first.detach(), first_values));
  CHECK(same_bits(buffer("last"), data.narrow(0, 2, 2)));
  CHECK(same_bits(buffer("a"), data.narrow(0, 0, 2).mean(0)));
  CHECK(same_bits(buffer("b"), data.narrow(0, 2, 2).mean(0)));
  (void)model->run({data}, "swap");
  CHECK(same_bits(buffer("a"), data.narrow(0, 2, 2).mean(0)));
  CHECK(same_bits(buffer("b"), data.narrow(0, 0, 2).mean(0)));
  for (const char* name : {"last", "a", "b"}) CHECK(net.attr(name).toTensor().is_same(buffer(name)));
}

TEST_CASE("backward notices a buffer that it needs and a method has assigned to", "[script][mistakes]") {
  for (const char* update : {"self.scale * 2", "torch.cat([self.scale, self.scale])"}) {
    CAPTURE(update);
    torch::jit::Module net("Scaled");
    net.register_parameter("weight", torch::ones({2}).requires_grad_(), /*is_buffer=*/false);
    net.register_buffer("scale", torch::ones({2}));
    net.define("def forward(self, x):\n  y = x * self.weight * self.scale\n  self.scale = " +
               std::string(update) + "\n  return y\n");
    const auto model = modules::script_module(net);
    const Tensor y = model->forward(torch::ones({2}));
    CHECK_THROWS_WITH(y.sum().backward(), Catch::Matchers::Contains("modified by an inplace operation"));
  }
}

TEST_CASE("what was trained is in the file that TorchScript writes, and in a checkpoint",
          "[script][resume]") {
  // What TorchScript has compiled anew after its first calls rounds in other places.
  const torch::jit::GraphOptimizerEnabledGuard as_written(false);
  const CapturedStderr quiet;
  const TemporaryFolder folder;
  const auto whole = make_net();
  train(whole, 10, folder.path("whole"));
  const auto stopped = make_net();
  train(stopped, 5, folder.path("stopped"));
  const auto resumed = make_net(2);  // other weights, which resume overwrites
  train(resumed, 10, folder.path("stopped"));
  CHECK(same_bits(all_tensors(resumed), all_tensors(whole)));

  std::stringstream file;
  whole.save(file);
  CHECK(same_bits(all_tensors(torch::jit::load(file)), all_tensors(whole)));
}

TEST_CASE("two ranks with a TorchScript module each train one model", "[script][ranks]") {
  std::vector<std::vector<Tensor>> found(2);
  const auto worlds = Communicator::in_process(2);
  const std::vector<torch::jit::Module> nets{make_net(1), make_net(2)};
  CHECK(first_of(run_ranks(2, [&](int rank) {
          const auto i = static_cast<size_t>(rank);
          train(nets[i], 6, "", worlds[i]);
          found[i] = all_tensors(nets[i]);
        })) == "");
  CHECK(same_bits(found[0], found[1]));
}

TEST_CASE("what a TorchScript module cannot do is said", "[script][mistakes]") {
  const auto model = modules::script_module(make_net());
  CHECK(message_of<InvalidArgument>([&] { (void)model->run({batch(0)}, "backward"); }) ==
        "the TorchScript module Net has no method backward");
  CHECK(message_of<InvalidArgument>([&] { (void)model->run({batch(0)}, "swap"); })
            .find("after swap, parameter weight of the TorchScript module First is another tensor here than "
                  "there") == 0);

  auto net = make_net();
  net.define("def pair(self, x):\n  return x, x\n");
  CHECK(modules::script_module(net)->run({batch(0)}, "pair").isTuple());
  torch::jit::Module pair("Pair");
  pair.register_parameter("weight", torch::ones({1}), false);
  pair.define("def forward(self, x):\n  return x, self.weight\n");
  CHECK(message_of<InvalidArgument>([&] { (void)modules::script_module(pair)->forward(batch(0)); }) ==
        "forward of the TorchScript module returns Tuple and no tensor; call run({...}) and take it apart");

  torch::jit::Module empty("Empty");
  CHECK(message_of<InvalidArgument>([&] {
          (void)modules::script_module(empty);
        }).find("the TorchScript module Empty has no parameters") == 0);
}

}  // namespace pacer::testing::script_module
