#include "sharded_step.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <pacer/modules/blocks.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/shards.h>
#include <pacer/session/session.h>

namespace slow_network {
namespace {

struct SumImpl : torch::nn::Module {
  void add(const torch::Tensor& parameter) {
    register_parameter("parameter" + std::to_string(parameters().size()), parameter);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor sum = x;
    for (const torch::Tensor& parameter : parameters()) sum = sum + parameter.sum();
    return sum;
  }
};
TORCH_MODULE(Sum);

// Blocks of at least kBucketBytes, but for the last.
struct BlockModelImpl : torch::nn::Module {
  explicit BlockModelImpl(const Parameters& parameters) {
    register_module("blocks", blocks);
    int64_t bytes = kBucketBytes;
    for (const auto& [name, parameter] : parameters) {
      if (bytes >= kBucketBytes) {
        blocks->push_back(Sum());
        bytes = 0;
      }
      blocks->ptr<SumImpl>(blocks->size() - 1)->add(parameter);
      bytes += static_cast<int64_t>(parameter.nbytes());
    }
  }
  torch::Tensor loss(torch::Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &SumImpl::forward, x);
    return x;
  }
  pacer::Blocks blocks;
};
TORCH_MODULE(BlockModel);

// In the order in which they must end.
struct ShardedTraining {
  BlockModel model;
  pacer::FusedAdamW optimizer;
  pacer::Session session;
  torch::Tensor x;

  ShardedTraining(const Parameters& parameters, const std::shared_ptr<pacer::Communicator>& world,
                  bool has_blocks, pacer::ShardGroup over)
      : model(parameters),
        optimizer(model->named_parameters(), pacer::FusedAdamWOptions(1e-4)),
        session(*model, optimizer, world),
        x(torch::zeros({}, torch::TensorOptions().device(world->device()))) {
    const auto options = pacer::ShardsOptions().over(over);
    session.use(has_blocks ? pacer::Shards(model->blocks, options) : pacer::Shards(options));
  }
  ~ShardedTraining() { session.finish(); }

  void step() {
    auto [input] = session.begin(x);
    session.backward(model->loss(input));
    session.step();
  }
};

}  // namespace

std::function<void()> sharded_step(const Parameters& parameters,
                                   const std::shared_ptr<pacer::Communicator>& world, bool blocks,
                                   pacer::ShardGroup over) {
  const auto training = std::make_shared<ShardedTraining>(parameters, world, blocks, over);
  training->step();
  return [training] { training->step(); };
}

}  // namespace slow_network
