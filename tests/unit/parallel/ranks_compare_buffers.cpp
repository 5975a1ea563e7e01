// What else ranks that train one model must have alike: values of buffers, and what forward writes to.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::ranks_compare_buffers {
namespace {

using torch::optim::Optimizer;
using OwnWorld = std::shared_ptr<Communicator>;

CommunicatorOptions impatient() { return CommunicatorOptions().timeout(std::chrono::seconds(10)); }

// Multiplies by a table that was drawn at random.
struct TableImpl : torch::nn::Module {
  TableImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  Tensor forward(const Tensor& x) { return linear(x) * table; }
  Tensor table = register_buffer("table", torch::rand({4}));
  torch::nn::Linear linear;
};
TORCH_MODULE(Table);

struct Tables {
  explicit Tables(const std::function<void(Session&)>& use) {
    const auto worlds = Communicator::in_process(2, impatient());
    for (int rank = 0; rank < 2; ++rank) {
      torch::manual_seed(rank);
      models.emplace_back();
      torch::manual_seed(2);
      torch::NoGradGuard no_grad;
      for (Tensor& parameter : models[rank]->parameters()) parameter.normal_();
    }
    drawn = models[0]->table.clone();
    messages = run_ranks(2, [&](int rank) {
      Table& model = models[rank];
      FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
      Session session(*model, optimizer, worlds[rank]);
      use(session);
      for (int i = 0; i < 2; ++i) {
        auto [x] = session.begin(torch::ones({2, 4}) * (rank + i));
        session.backward(model->forward(x).square().mean());
        session.step();
      }
      session.finish();
    });
  }
  std::vector<Table> models;
  Tensor drawn;  // by rank 0
  std::vector<std::string> messages;
};

template <class H, class Options>
std::function<void(Session&)> starting(InitialParameters initial, bool sync) {
  return [=](Session& s) { s.use(H(Options().initial_parameters(initial).sync_buffers(sync))); };
}

TEST_CASE("buffers that ranks drew at random begin as those of rank 0") {
  for (const bool sync : {true, false}) {
    for (const auto& use : {starting<DataParallel, DataParallelOptions>(InitialParameters::broadcast, sync),
                            starting<Shards, ShardsOptions>(InitialParameters::broadcast, sync)}) {
      const Tables run(use);
      REQUIRE(first_of(run.messages) == "");
      for (const Table& model : run.models) CHECK(model->table.equal(run.drawn));
      CHECK(run.models[0]->linear->weight.equal(run.models[1]->linear->weight));
    }
  }
}

TEST_CASE("where ranks compare their initial parameters, they compare buffers, too") {
  for (const auto& use : {starting<DataParallel, DataParallelOptions>(InitialParameters::check, true),
                          starting<Shards, ShardsOptions>(InitialParameters::check, true)}) {
    for (const std::string& message : Tables(use).messages) {
      CHECK(contains(message, "initial value of buffer table: checksum"));
    }
  }
  // Those of each rank's own are not compared.
  const Tables own(starting<DataParallel, DataParallelOptions>(InitialParameters::check, false));
  CHECK(first_of(own.messages) == "");
  CHECK_FALSE(own.models[0]->table.equal(own.models[1]->table));
}

TEST_CASE("a buffer of another shape is named before anything is sent") {
  const auto worlds = Communicator::in_process(2, impatient());
  const auto messages = run_ranks(2, [&](int rank) {
    Table model;
    model->register_buffer("cache", torch::zeros({2 + rank}));
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, worlds[rank]);
    (void)session.begin(torch::ones({2, 4}));
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "buffer cache: Float [2]"));
    CHECK(contains(message, "buffer cache: Float [3]"));
  }
}

// Rows that are longer than 1 are shortened when they are looked up.
struct LookedUpImpl : torch::nn::Module {
  LookedUpImpl()
      : rows(register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).max_norm(1.0)))),
        linear(register_module("linear", torch::nn::Linear(4, 2))) {}
  Tensor forward(const Tensor& ids) { return linear(rows(ids)); }
  torch::nn::Embedding rows;
  torch::nn::Linear linear;
};
TORCH_MODULE(LookedUp);

void require_equal_replicas(const std::function<std::unique_ptr<Optimizer>(LookedUp&, OwnWorld)>& make,
                            const std::function<void(Session&)>& use, at::ScalarType dtype) {
  const auto worlds = Communicator::in_process(2, impatient());
  std::vector<LookedUp> models(2);
  for (LookedUp& model : models) {
    torch::manual_seed(5);
    for (Tensor& parameter : model->parameters()) {
      const torch::NoGradGuard no_grad;
      parameter.normal_();
    }
    model->to(dtype);
  }
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const auto optimizer = make(models[rank], worlds[rank]);
            Session session(*models[rank], *optimizer, worlds[rank]);
            use(session);
            for (int i = 0; i < 6; ++i) {  // other rows on each rank
              if (i == 3) session.evaluate([&] { models[rank]->forward(torch::tensor({6 + rank})); });
              auto [ids] = session.begin(torch::tensor({rank, 2 + rank}));
              session.backward(models[rank]->forward(ids).square().mean());
              session.step();
              for (const Tensor& parameter : models[rank]->parameters()) {
                std::string bytes(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
                const auto all = worlds[rank]->exchange(bytes);
                RANK_REQUIRE(all[0] == all[1]);
              }
            }
            session.finish();
          })) == "");
  CHECK(models[0]->rows->weight.norm(2, 1).slice(0, 0, 1).item<double>() < 1.05);
}

TEST_CASE("replicas stay the same where forward writes to a parameter") {
  const auto fused = [](LookedUp& model, const OwnWorld&) -> std::unique_ptr<Optimizer> {
    return std::make_unique<FusedAdamW>(model->parameters(), FusedAdamWOptions(0.01));
  };
  const auto torchs = [](LookedUp& model, const OwnWorld&) -> std::unique_ptr<Optimizer> {
    return std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.01));
  };
  const auto lamb = [](LookedUp& model, const OwnWorld&) -> std::unique_ptr<Optimizer> {
    return std::make_unique<FusedLamb>(model->parameters(), FusedLambOptions(0.01));
  };
  const auto bits = [](LookedUp& model, const OwnWorld& world) -> std::unique_ptr<Optimizer> {
    return std::make_unique<OneBitAdam>(model->parameters(), OneBitAdamOptions(0.01).freeze_step(3), world);
  };
  const auto plain = [](Session& s) { s.use(DataParallel()); };
  const auto unsynced = [](Session& s) { s.use(DataParallel(DataParallelOptions().sync_buffers(false))); };
  const auto clipped = [](Session& s) { s.use(DataParallel()).use(GradientClipping(1.0)); };
  const auto shards = [](Session& s) { s.use(Shards()); };
  require_equal_replicas(fused, plain, at::kFloat);
  require_equal_replicas(fused, unsynced, at::kFloat);
  require_equal_replicas(fused, clipped, at::kBFloat16);
  require_equal_replicas(fused, shards, at::kFloat);
  require_equal_replicas(torchs, plain, at::kFloat);
  require_equal_replicas(lamb, plain, at::kFloat);
  require_equal_replicas(bits, plain, at::kFloat);
}

}  // namespace
}  // namespace pacer::testing::ranks_compare_buffers
