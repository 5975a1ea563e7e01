// Blocks that have no memory at first, on a GPU: they are made on the CPU, get values on the GPU one by one, and the
// device has room for the parts and one block more.
#include "support/catch.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <pacer/modules/deferred.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/parameter_shards.h>
#include <pacer/parallel/shards.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"
#include "support/modules/gpu_blocks.h"

namespace pacer::testing::shards_deferred_gpu {
namespace {

using gpu_blocks::kGpu;
using gpu_blocks::Mlp;
using gpu_blocks::Stack;

void draw(torch::nn::Module& block) {
  for (Tensor& parameter : block.parameters()) parameter.normal_(0, 0.02);
}

// Weights after three steps.
std::vector<Tensor> trained(bool is_deferred, at::ScalarType dtype) {
  torch::manual_seed(7);
  Stack model(3, 64);
  const MaterializeBlock f = seeded_blocks(3, draw);
  ShardsOptions options;
  if (is_deferred) {
    defer_initialization(*model->blocks, torch::device(kGpu).dtype(dtype));
    options.materialize(f);
  }
  model->to(kGpu, dtype);
  for (size_t i = 0; i < 3; ++i) {
    const at::NoGradGuard no_grad;
    model->blocks->ptr(i)->as<Mlp>()->drop->options.p(0);
    if (!is_deferred) f({*model->blocks->ptr(i), i, ""});
  }
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer, Communicator::alone(kGpu));
  session.use(Shards(model->blocks, options));
  for (int64_t step = 0; step < 3; ++step) {
    auto [x] = session.begin(torch::linspace(-1, 1, 256, kGpu).view({4, 64}).to(dtype));
    session.backward(model->forward(x).to(at::kFloat).square().mean());
    session.step();
  }
  session.finish();
  std::vector<Tensor> values;
  for (const Tensor& parameter : model->parameters()) values.push_back(parameter.detach().cpu().clone());
  return values;
}

int64_t allocated(bool peak) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto& all = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return peak ? all.peak : all.current;
}

}  // namespace

TEST_CASE("blocks that get values one by one on a GPU train as a whole model, to the bit",
          "[gpu][shards][deferred]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto found = trained(true, dtype), wanted = trained(false, dtype);
    for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(found[i].equal(wanted[i]));
  }
}

TEST_CASE("blocks without memory take none of a GPU, and one of them is whole there at a time",
          "[gpu][shards][deferred]") {
  PACER_NEEDS_GPU();
  constexpr size_t kBlocks = 8;
  Stack model(kBlocks, 512);
  c10::cuda::CUDACachingAllocator::emptyCache();
  const int64_t before = allocated(false);
  defer_initialization(*model->blocks, kGpu);
  REQUIRE(allocated(false) == before);
  std::vector<ParameterShards::Group> groups;
  int64_t bytes = 0;  // of all blocks
  for (const auto& block : *model->blocks) {
    groups.emplace_back();
    for (const auto& item : block->named_parameters()) {
      groups.back().emplace_back(std::to_string(groups.size()) + item.key(), item.value());
      bytes += static_cast<int64_t>(item.value().nbytes());
    }
  }
  ParameterShards shards(groups, Communicator::alone(kGpu));
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  const MaterializeBlock f = seeded_blocks(3, draw);
  for (size_t i = 0; i < kBlocks; ++i) {
    const at::NoGradGuard no_grad;
    shards.give_memory(i);
    f({*model->blocks->ptr(i), i, ""});
    shards.keep_part(i);
  }
  shards.keep_parts();
  // Of one rank the parts are all of it.
  const int64_t block = bytes / static_cast<int64_t>(kBlocks);
  REQUIRE(allocated(true) - before < bytes + 2 * block + (1 << 20));
}

}  // namespace pacer::testing::shards_deferred_gpu
