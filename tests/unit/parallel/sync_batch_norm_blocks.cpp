// A stack of blocks with SyncBatchNorm under what hooks do to blocks: recomputed, dropped, and with parameters that
// come and go, on two ranks beside one process with the whole batch.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::sync_batch_norm_blocks {
namespace {

constexpr int64_t kSize = 6, kRows = 8;

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kSize, kSize))};
  modules::SyncBatchNorm norm{register_module("norm", modules::SyncBatchNorm(kSize))};
  Tensor forward(const Tensor& x) { return x + torch::tanh(norm(linear(x))); }
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(3);
    register_module("blocks", blocks);
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
    to(torch::kDouble);
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
    return x;
  }
  Blocks blocks;
};
TORCH_MODULE(Stack);

using Use = std::function<void(Session&, Stack&)>;

// Parameters and buffers of rank 0 after five steps of so many ranks.
std::vector<Tensor> trained(int ranks, const Use& use) {
  const CapturedStderr quiet;
  std::vector<Tensor> values;
  std::vector<Stack> models;  // which all draw from one generator
  for (int rank = 0; rank < ranks; ++rank) models.emplace_back();
  const auto worlds = Communicator::in_process(ranks);
  const auto messages = run_ranks(ranks, [&](int rank) {
    const auto& world = worlds[static_cast<size_t>(rank)];
    Stack& model = models[static_cast<size_t>(rank)];
    convert_sync_batch_norm(*model, world);
    FusedSgd optimizer(model->parameters(), FusedSgdOptions(0.1).momentum(0.9));
    Session session(*model, optimizer, world);
    use(session, model);
    for (int64_t step = 0; step < 5; ++step) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
      const Tensor all = torch::randn({kRows, kSize}, generator, torch::kDouble) + 1;
      auto [x] = session.begin(all.slice(0, rank, kRows, ranks).contiguous());
      session.backward(torch::mse_loss(model->forward(x), x.roll(1, 1)));
      session.step();
    }
    {
      const auto whole = session.whole_parameters();
      if (rank == 0) {
        for (const Tensor& tensor : model->parameters()) values.push_back(tensor.detach().clone());
        for (const Tensor& tensor : model->buffers()) values.push_back(tensor.clone());
      }
    }
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  return values;
}

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double most = 0;
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

}  // namespace

TEST_CASE("blocks with SyncBatchNorm train as in one process when they are recomputed or shared out",
          "[sync_batch_norm][session][ranks]") {
  const auto one = trained(1, [](Session&, Stack&) {});
  const Use recomputed = [](Session& session, Stack& model) { session.use(Recompute(model->blocks)); };
  const Use shared = [](Session& session, Stack& model) { session.use(Shards(model->blocks)); };
  const Use both = [](Session& session, Stack& model) {
    session.use(Shards(model->blocks)).use(Recompute(model->blocks));
  };
  const Use state = [](Session& session, Stack&) {
    session.use(Shards(ShardsOptions().what(Sharded::state)));
  };
  // What another order of sums leaves in fp64, which training makes larger.
  for (const Use& use : {recomputed, shared, both, state})
    CHECK(largest_difference(trained(2, use), one) < 1e-11);
}

TEST_CASE("blocks with SyncBatchNorm that LayerDrop drops are dropped on all ranks",
          "[sync_batch_norm][layer_drop]") {
  const bool per_sample = GENERATE(false, true);
  const Use dropped = [&](Session& session, Stack& model) {
    session.use(LayerDrop(model->blocks, LayerDropOptions()
                                             .theta_bar(0.5)
                                             .schedule(constant_schedule())
                                             .depth(DropDepth::uniform)
                                             .per_sample(per_sample)));
    session.use(Recompute(model->blocks));
  };
  const auto one = trained(1, dropped), two = trained(2, dropped);
  if (!per_sample) CHECK(largest_difference(two, one) < 1e-11);  // by sample, other ranks drop other rows
  const auto batches = [](const std::vector<Tensor>& values) {
    double sum = 0;
    for (const Tensor& tensor : values) sum += tensor.dim() == 0 ? tensor.item<double>() : 0;
    return sum;
  };
  CHECK(batches(one) == batches(two));
  CAPTURE(per_sample, batches(two));
  CHECK(batches(two) <= 20);
  CHECK((batches(two) == 20) == per_sample);
}

TEST_CASE("an evaluation on one rank between two steps asks no other", "[sync_batch_norm][session][ranks]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    const auto& world = worlds[static_cast<size_t>(rank)];
    Stack model;
    convert_sync_batch_norm(*model, world);
    FusedSgd optimizer(model->parameters(), FusedSgdOptions(0.1));
    Session session(*model, optimizer, world);
    for (int step = 0; step < 2; ++step) {
      auto [x] = session.begin(torch::full({2, kSize}, rank + step + 1.0, torch::kDouble));
      session.backward(model->forward(x).square().mean());
      session.step();
      if (rank == 0) (void)session.evaluate([&] { return model->forward(x).sum().item<double>(); });
    }
    session.finish();
  });
  CHECK(first_of(messages) == "");
}

}  // namespace pacer::testing::sync_batch_norm_blocks
