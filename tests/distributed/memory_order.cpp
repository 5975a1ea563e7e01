// Convolutions whose parameters lie in memory in another order on the last rank, from the start or later, or on
// all of them.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <pacer/pacer.h>

#include "replicas.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

using torch::Tensor;

void to_channels_last(torch::nn::Sequential& model) {
  for (Tensor& parameter : model->parameters()) {
    if (parameter.dim() != 4) continue;
    parameter.set_data(parameter.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
}

torch::nn::Sequential convolutions(at::Device device) {
  torch::manual_seed(2);
  torch::nn::Sequential model(torch::nn::Conv2d(3, 8, 3), torch::nn::Conv2d(8, 4, 3));
  model->to(device);
  return model;
}

// The order changes before step number `changes_at`, if there is one.
void train(torch::nn::Sequential& model, const std::shared_ptr<Communicator>& world, int changes_at) {
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
  if (changes_at == 0) to_channels_last(model);
  Session session(*model, optimizer, world);
  for (int step = 0; step < 3; ++step) {
    if (step == changes_at && step > 0) to_channels_last(model);
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
  const int never = -1;
  for (const int changes_at : {0, 1}) {
    const auto world = join(changes_at == 0 ? "-all" : "-all-later");
    torch::nn::Sequential model = convolutions(world->device());
    train(model, world, changes_at);
    expect_replicas(*world, *model, "channels last on all");
  }
  for (const int changes_at : {0, 2}) {
    const auto world = join(changes_at == 0 ? "-one" : "-one-later");
    torch::nn::Sequential model = convolutions(world->device());
    std::string words;
    try {
      train(model, world, player.rank == player.world_size - 1 ? changes_at : never);
    } catch (const CommunicationError& error) {
      words = error.what();
    }
    expect(words.find("[8, 3, 3, 3], strides [27, 1, 9, 3]") != std::string::npos, "the strides in ", words);
  }
});

}  // namespace
}  // namespace pacer::testing
