// Ranks whose data end at different steps: those that have none left go on with batches without rows, which count for
// nothing, until the last one has none.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::uneven_ranks {
namespace {

const std::vector<int64_t> kBatches{3, 6, 1};  // of each rank

torch::nn::Sequential make_model() {
  torch::nn::Sequential model(torch::nn::Linear(3, 4), torch::nn::Tanh(), torch::nn::Linear(4, 2));
  double seed = 0.1;
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : model->parameters()) {
    parameter.copy_(torch::linspace(-1, 1, parameter.numel()).mul(++seed).sin().view(parameter.sizes()));
  }
  model->to(torch::kDouble);
  return model;
}

// As many rows as rank and number say.
Tensor batch(int rank, int64_t number) {
  const int64_t rows = 2 + (rank + number) % 3;
  return torch::linspace(-1, 1, rows * 3, torch::kDouble)
      .add(0.3 * rank + 0.1 * static_cast<double>(number))
      .view({rows, 3});
}
Tensor loss_of(torch::nn::Sequential& model, const Tensor& x) {
  return (model->forward(x) - 0.5).square().mean();
}

std::vector<Tensor> one_rank(const std::shared_ptr<Communicator>& world, bool by_tokens,
                             const std::function<void(Session&)>& add) {
  auto model = make_model();
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(model, optimizer, world);
  session.use(GradientAccumulation(GradientAccumulationOptions(1).weight_by_tokens(by_tokens)));
  add(session);
  const int64_t batches = kBatches.at(static_cast<size_t>(world->rank()));
  for (int64_t number = 0;; ++number) {
    const bool has_batch = number < batches;
    const std::vector<std::string> all = world->exchange(has_batch ? "has a batch" : "");
    if (std::all_of(all.begin(), all.end(), [](const std::string& text) { return text.empty(); })) break;
    auto [x] = session.begin(has_batch ? batch(world->rank(), number) : torch::empty({0, 3}, torch::kDouble));
    session.backward(loss_of(model, x));
    session.step();
  }
  RANK_REQUIRE(session.progress().step == 6);
  session.finish();
  return model->parameters();
}

// What torch's AdamW makes of the mean over the ranks that have a batch, or over all of their rows.
std::vector<Tensor> by_hand(bool by_rows) {
  auto model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  for (int64_t number = 0; number < 6; ++number) {
    Tensor sum = torch::zeros({}, torch::kDouble);
    double weights = 0;
    for (int rank = 0; rank < 3; ++rank) {
      if (number >= kBatches[static_cast<size_t>(rank)]) continue;
      const Tensor x = batch(rank, number);
      const double weight = by_rows ? static_cast<double>(x.size(0)) : 1;
      sum = sum + weight * loss_of(model, x);
      weights += weight;
    }
    optimizer.zero_grad();
    (sum / weights).backward();
    optimizer.step();
  }
  return model->parameters();
}

}  // namespace

TEST_CASE("ranks whose data end early go on without rows, and the mean is that of the others",
          "[ranks][padding]") {
  const bool by_tokens = GENERATE(false, true);
  const auto [name, add] = GENERATE(table<const char*, std::function<void(Session&)>>(
      {{"as a Session does", [](Session&) {}},
       {"small buckets",
        [](Session& s) {
          s.use(DataParallel(DataParallelOptions().bucket_bytes(64).first_bucket_bytes(8)));
        }},
       {"state shared out",
        [](Session& s) { s.use(Shards(ShardsOptions().what(Sharded::state).unit_bytes(100))); }},
       {"gradients shared out", [](Session& s) { s.use(Shards(ShardsOptions().unit_bytes(100))); }}}));
  CAPTURE(by_tokens, name);
  const CapturedStderr captured;
  const auto worlds = Communicator::in_process(3);
  std::vector<std::vector<Tensor>> found(3);
  CHECK(first_of(run_ranks(3, [&, &add = add](int rank) {
          const auto i = static_cast<size_t>(rank);
          found[i] = one_rank(worlds[i], by_tokens, add);
        })) == "");
  const std::vector<Tensor> wanted = by_hand(by_tokens);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(distance(found[0][i], wanted[i]) < 1e-12);
  CHECK(same_bits(found[1], found[0]));
  CHECK(same_bits(found[2], found[0]));
  CHECK(captured.text().empty());  // of nothing that the ranks without data did is warned
}

}  // namespace pacer::testing::uneven_ranks
