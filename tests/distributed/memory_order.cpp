// Convolutions whose parameters lie in memory in another order on the last rank, or on all of them.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <pacer/pacer.h>

#include "replicas.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

using torch::Tensor;

torch::nn::Sequential convolutions(at::Device device, bool is_channels_last) {
  torch::manual_seed(2);
  torch::nn::Sequential model(torch::nn::Conv2d(3, 8, 3), torch::nn::Conv2d(8, 4, 3));
  model->to(device);
  for (Tensor& parameter : model->parameters()) {
    const auto order = is_channels_last && parameter.dim() == 4 ? at::MemoryFormat::ChannelsLast
                                                                : at::MemoryFormat::Contiguous;
    parameter.set_data(parameter.detach().contiguous(order));
  }
  return model;
}

void train(torch::nn::Sequential& model, const std::shared_ptr<Communicator>& world) {
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer, world);
  for (int step = 0; step < 3; ++step) {
    auto [x] = session.begin(torch::full({2, 3, 8, 8}, world->rank() + step + 1.0));
    session.backward(model->forward(x).square().mean());
    session.step();
  }
  session.finish();
}

const AddScenario memory_order("memory_order", [](const Player& player) {
  const auto join = [&](const char* name) {
    Player met = player;
    met.arguments["file"] += name;
    return std::make_shared<Communicator>(met.connect(), met.options());
  };
  {
    const auto world = join("-all");
    torch::nn::Sequential model = convolutions(world->device(), /*is_channels_last=*/true);
    train(model, world);
    expect_replicas(*world, *model, "channels last on all");
  }
  const auto world = join("-one");
  torch::nn::Sequential model = convolutions(world->device(), player.rank == player.world_size - 1);
  try {
    train(model, world);
  } catch (const CommunicationError& error) {
    const std::string words = error.what();
    expect(words.find("[8, 3, 3, 3], strides [27, 1, 9, 3]") != std::string::npos, "the strides in ", words);
    return;
  }
  throw Error("ranks with other memory orders trained together");
});

}  // namespace
}  // namespace pacer::testing
