// A net with batch norms whose statistics are those of all ranks' rows: beside one process with the whole batch, with
// gradients that travel at the same time, and with an input on the last rank that does not fit.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <pacer/pacer.h>

#include "replicas.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

using torch::Tensor;

// x [N, 3, 8, 8] -> [N, 5, 2, 2], in fp64.
torch::nn::Sequential net_on(at::Device device) {
  torch::manual_seed(4);
  torch::nn::Sequential net;
  int64_t channels = 3;
  for (const int64_t next : {16, 32, 5}) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, next, 3).bias(false)));
    net->push_back(torch::nn::BatchNorm2d(next));
    net->push_back(torch::nn::Tanh());
    channels = next;
  }
  net->to(device, torch::kDouble);
  return net;
}

// Trains on every W-th row of the batches of W ranks, from row number `rank` on, or on all of them; returns parameters
// and buffers in fp64, on the CPU.
std::vector<Tensor> trained(torch::nn::Sequential& net, Session& session, int steps, int ranks,
                            std::optional<int> rank) {
  session.use(GradientClipping(1.0));
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(100 + step);
    const Tensor all = torch::randn({4 * ranks, 3, 8, 8}, torch::kDouble) + 1;
    auto [x] = session.begin(rank ? all.slice(0, *rank, 4 * ranks, ranks).contiguous() : all);
    const Tensor target = x.slice(1, 0, 1).slice(2, 0, 2).slice(3, 0, 2).expand({-1, 5, 2, 2});
    session.backward(torch::mse_loss(net->forward(x), target));
    session.step();
  }
  session.finish();
  std::vector<Tensor> values;
  for (const Tensor& tensor : net->parameters()) values.push_back(tensor.detach().cpu());
  for (const Tensor& tensor : net->buffers()) values.push_back(tensor.cpu().to(torch::kDouble));
  return values;
}

const auto kOptions = FusedSgdOptions(0.05).momentum(0.9);

const AddScenario train_batch_norm("train_batch_norm", [](const Player& player) {
  const auto world = std::make_shared<Communicator>(player.connect(), player.options());
  const int steps = player.number("steps");
  torch::nn::Sequential net = net_on(world->device());
  expect(convert_sync_batch_norm(*net, world).size() == 3, "three batch norms");
  FusedSgd optimizer(net->parameters(), kOptions);
  Session session(*net, optimizer, world);
  // Many small buckets, so that gradients travel beside the sums of batch norms.
  session.use(
      DataParallel(DataParallelOptions().bucket_bytes(64).first_bucket_bytes(64).sync_buffers(false)));
  const auto own = trained(net, session, steps, world->world_size(), world->rank());
  expect_replicas(*world, *net, "replicas with batch norms");

  torch::nn::Sequential whole = net_on(at::kCPU);
  FusedSgd whole_optimizer(whole->parameters(), kOptions);
  Session whole_session(*whole, whole_optimizer, Communicator::alone(at::kCPU));
  const auto wanted = trained(whole, whole_session, steps, world->world_size(), std::nullopt);
  double most = 0;
  for (size_t i = 0; i < own.size(); ++i)
    most = std::max(most, (own[i] - wanted[i]).abs().max().item<double>());
  // What another order of sums leaves in fp64, which training makes larger. Statistics of own rows differ in the
  // second digit.
  expect(most < 1e-9, "one process with the whole batch, not a difference of ", most);
});

const AddScenario batch_norm_mistake("batch_norm_mistake", [](const Player& player) {
  const auto world = std::make_shared<Communicator>(player.connect(), player.options());
  modules::SyncBatchNorm norm(3);
  norm->to(world->device());
  convert_sync_batch_norm(*norm, world);
  const bool is_wrong = player.rank == player.world_size - 1;
  std::string words;
  const auto options = torch::TensorOptions().device(world->device());
  try {
    norm(torch::ones({2, 3}, options)).sum().backward();
    const Tensor y = norm(torch::ones({2, is_wrong ? 4 : 3}, options));
    y.sum().item();  // on a GPU a failure shows late
    world->check();
  } catch (const std::exception& error) {
    words = error.what();
  }
  expect(words.find("was given a tensor [2, 4] of 4 channels") != std::string::npos, "the reason in ", words);
});

}  // namespace
}  // namespace pacer::testing
