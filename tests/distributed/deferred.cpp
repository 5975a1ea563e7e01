// A language model whose layers have no memory at first, beside one that each process makes whole.
#include <memory>
#include <string>
#include <vector>

#include <pacer/pacer.h>

#include "replicas.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

// The weights after so many steps, on the CPU.
std::vector<torch::Tensor> train_layers(const std::shared_ptr<Communicator>& world, int steps,
                                        bool is_deferred) {
  modules::CausalLm model(modules::CausalLmOptions(60, 32, 3, 2).deferred(is_deferred));
  if (is_deferred) defer_initialization(*model->layers, world->device());
  model->to(world->device());
  const MaterializeBlock f =
      seeded_blocks(5, [m = model.get()](torch::nn::Module& layer) { m->reset_parameters(layer); });
  for (size_t i = 0; i < model->layers->size() && !is_deferred; ++i) f({*model->layers->ptr(i), i, ""});
  {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(8 + world->rank());  // rank 0's are taken over
    model->embedding->weight.normal_(0, 0.1);
    model->head->weight.normal_(0, 0.1);
  }
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer, world);
  ShardsOptions options;
  if (is_deferred) options.materialize(f);
  session.use(GradientClipping(1.0)).use(Shards(model->layers, options));
  torch::manual_seed(100 + world->rank());
  for (int step = 0; step < steps; ++step) {
    auto [ids] = session.begin(torch::randint(60, {2, 12}, torch::kLong).to(world->device()));
    session.backward(model->loss(ids, ids));
    session.step();
  }
  const auto whole = session.whole_parameters();
  expect_replicas(*world, *model, "replicas of a model of deferred layers");
  std::vector<torch::Tensor> weights;
  for (const torch::Tensor& tensor : model->parameters()) weights.push_back(tensor.detach().cpu().clone());
  session.finish();
  return weights;
}

const AddScenario train_deferred("train_deferred", [](const Player& player) {
  const auto world = std::make_shared<Communicator>(player.connect(), player.options());
  const int steps = player.number("steps");
  const auto wanted = train_layers(world, steps, false), found = train_layers(world, steps, true);
  for (size_t i = 0; i < wanted.size(); ++i) expect(found[i].equal(wanted[i]), "the weights of whole layers");
});

}  // namespace
}  // namespace pacer::testing
