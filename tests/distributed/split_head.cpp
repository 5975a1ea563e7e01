// A language model whose head the ranks have in parts, beside the same ranks with a whole one.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <pacer/pacer.h>

#include "replicas.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

using torch::Tensor;

struct Trained {
  std::vector<double> losses;
  std::vector<Tensor> weights;  // in fp64, on the CPU
};

// With as many columns for each rank as a part has, but for the last one, which has fewer.
constexpr int64_t kColumns = 200, kRows = 4, kLength = 24;

Trained trained(const std::shared_ptr<Communicator>& world, int steps, bool is_split) {
  torch::manual_seed(8);
  modules::CausalLm model(modules::CausalLmOptions(kColumns, 32, 2, 2));
  model->to(world->device());
  FusedSgd optimizer(model->parameters(), FusedSgdOptions(0.5).momentum(0.9));
  Session session(*model, optimizer, world);
  session.use(GradientAccumulation(2)).use(GradientClipping(1.0));
  session.use(Shards(model->layers, ShardsOptions().split_head(is_split)));
  Trained result;
  torch::manual_seed(100 + world->rank());
  for (int step = 0; step < steps; ++step) {
    const Tensor text = torch::randint(kColumns, {kRows, kLength + 1}, torch::kLong);
    auto [ids, targets] = session.begin(text.narrow(1, 0, kLength).contiguous().to(world->device()),
                                        text.narrow(1, 1, kLength).contiguous().to(world->device()));
    const Tensor loss = model->loss(ids, targets);
    session.backward(loss);
    session.step();
    result.losses.push_back(loss.item<double>());
  }
  const auto whole = session.whole_parameters();
  expect_replicas(*world, *model, "replicas of a model with a head in parts");
  for (const Tensor& tensor : model->parameters()) {
    result.weights.push_back(tensor.detach().to(torch::kDouble).cpu());
  }
  session.finish();
  return result;
}

const AddScenario train_split_head("train_split_head", [](const Player& player) {
  const auto world = std::make_shared<Communicator>(player.connect(), player.options());
  const int steps = player.number("steps");
  const Trained wanted = trained(world, steps, false), found = trained(world, steps, true);
  double most = 0, of_losses = 0;
  for (size_t i = 0; i < wanted.weights.size(); ++i)
    most = std::max(most, (found.weights[i] - wanted.weights[i]).abs().max().item<double>());
  for (size_t i = 0; i < wanted.losses.size(); ++i)
    of_losses = std::max(of_losses, std::abs(found.losses[i] - wanted.losses[i]));
  // What another order of sums leaves in fp32, which training makes larger.
  expect(most < 1e-4 && of_losses < 1e-4, "a whole head's weights and losses, not differences of ", most,
         " and ", of_losses);
  expect(wanted.losses.back() != wanted.losses.front(), "losses that move");
});

}  // namespace
}  // namespace pacer::testing
