// Models whose blocks have no memory until ranks keep parts of them: values, memory, and what is refused.
#include <pacer/modules/causal_lm.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/muon.h>

#include "support/cpu_memory.h"
#include "support/parallel/deferred_runs.h"
#include "support/session/mistakes.h"

namespace pacer::testing::deferred {

namespace {

Plan whole(Plan plan) {
  plan.is_deferred = false;
  return plan;
}

using Spoil = std::function<void(OddModel&)>;
using Use = std::function<void(Session&, OddModel&)>;

// What a program of one rank hears that shall not begin.
std::string heard(const Spoil& spoil, const Use& use) {
  return heard_of([&] {
    OddModel model = model_of(Plan());
    spoil(model);
    FusedAdamW optimizer(parameters_of(*model), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, Communicator::in_process(1)[0]);
    use(session, model);
    (void)session.begin(torch::ones({2, 5}));
  });
}

}  // namespace

TEST_CASE("blocks that get values one by one train as a whole model, to the bit",
          "[shards][blocks][deferred]") {
  std::vector<OddOptions> table(6);
  table[0].wider = 300;  // bounds between ranks cut matrices
  table[1].frozen_first = true;
  table[2].frozen_block = true;
  table[3].double_block = true;
  table[4].tied = true;
  table[5].empty_block = true;
  for (size_t i = 0; i < table.size(); ++i) {
    for (const int world_size : {1, 2, 3}) {
      if (i > 0 && world_size == 1 && i != 4) continue;
      INFO(i << " on " << world_size);
      Plan plan;
      plan.odd = table[i];
      plan.world_size = world_size;
      require_same(trained(plan), trained(whole(plan)));
    }
  }
}

TEST_CASE("a deferred model can be evaluated, read and changed once it has values",
          "[shards][blocks][deferred]") {
  Plan plan;
  plan.before_steps = [](Session& session, OddModel& model) {
    auto [x] = session.begin(torch::ones({2, 5}));
    session.backward(model->forward(x).square().mean());
    session.step();
    const Tensor before = session.evaluate([&] { return model->forward(torch::ones({2, 5})); });
    RANK_REQUIRE(before.isfinite().all().item<bool>());
    {
      const auto all = session.whole_parameters();
      const at::NoGradGuard no_grad;
      for (Tensor& parameter : model->parameters()) parameter.mul_(2);
    }
    const Tensor after = session.evaluate([&] { return model->forward(torch::ones({2, 5})); });
    RANK_REQUIRE(!after.equal(before));
  };
  require_same(trained(plan), trained(whole(plan)));
}

TEST_CASE("every kind of optimizer takes blocks that get values one by one", "[shards][blocks][deferred]") {
  std::vector<Plan> table(3);
  table[0].optimizer = [](torch::nn::Module& model) {
    return std::make_unique<FusedLamb>(parameters_of(model), FusedLambOptions(0.01));
  };
  table[1].optimizer = [](torch::nn::Module& model) {
    return std::make_unique<Muon>(muon_groups(model, MuonOptions(0.01).precision(MuonPrecision::fp32)));
  };
  table[2].dtype = at::kBFloat16;
  table[2].optimizer = adamw(FusedAdamWOptions(0.01).master_weights(MasterWeights::remainder));
  for (Plan& plan : table) {
    INFO(&plan - table.data());
    require_same(trained(plan), trained(whole(plan)));
    plan.initial = InitialParameters::check;
    require_same(trained(plan), trained(whole(plan)));
  }
}

TEST_CASE("a decoder of deferred layers trains as one that was made whole, also with its head in parts",
          "[shards][blocks][deferred][split_head]") {
  const auto shape = modules::CausalLmOptions(32, 16, 2, 2);
  const auto losses = [&](bool is_deferred, bool split_head) {
    const auto worlds = Communicator::in_process(2);
    std::vector<modules::CausalLm> models;
    for (int rank = 0; rank < 2; ++rank) {
      torch::manual_seed(5);
      models.emplace_back(modules::CausalLmOptions(shape).deferred(is_deferred));
      torch::manual_seed(6);  // as many numbers were not drawn
      const at::NoGradGuard no_grad;
      models.back()->head->weight.normal_(0, 0.1);
      models.back()->embedding->weight.normal_(0, 0.1);
    }
    std::vector<std::vector<double>> found(2);
    REQUIRE(first_of(run_ranks(2, [&](int rank) {
              modules::CausalLm& model = models[static_cast<size_t>(rank)];
              const MaterializeBlock f = seeded_blocks(
                  3, [m = model.get()](torch::nn::Module& layer) { m->reset_parameters(layer); });
              if (!is_deferred) {
                for (size_t i = 0; i < 2; ++i) f({*model->layers->ptr(i), i, ""});
              }
              FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
              Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
              ShardsOptions options = ShardsOptions().split_head(split_head);
              if (is_deferred) options.materialize(f);
              session.use(Shards(model->layers, options));
              for (int64_t step = 0; step < 3; ++step) {
                auto [ids] = session.begin(torch::arange(12).view({2, 6}) + rank + step);
                const Tensor loss = model->loss(ids, (ids + 1) % 32);
                found[static_cast<size_t>(rank)].push_back(loss.item<double>());
                session.backward(loss);
                session.step();
              }
              session.finish();
            })) == "");
    return found;
  };
  for (const bool split_head : {false, true}) REQUIRE(losses(true, split_head) == losses(false, split_head));
}

TEST_CASE("stacks of deferred blocks are numbered through, and know their names",
          "[shards][blocks][deferred]") {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() { register_module("first", first), register_module("second", second); }
    OddModel first{OddOptions()}, second{OddOptions()};
  };
  const auto model = std::make_shared<TwoImpl>();
  defer_initialization(*model->first->blocks);
  defer_initialization(*model->second->blocks->ptr(1));
  std::vector<std::string> seen;
  FusedAdamW optimizer(parameters_of(*model), FusedAdamWOptions(0.01));
  Session session(*model, optimizer, Communicator::in_process(1)[0]);
  session.use(Shards({model->first->blocks, model->second->blocks},
                     ShardsOptions().materialize([&](const DeferredBlock& block) {
                       seen.push_back(std::to_string(block.index) + " " + block.name);
                       draw_all(block.module);
                     })));
  (void)session.begin(torch::ones({2, 5}));
  REQUIRE(seen == std::vector<std::string>{"0 first.blocks.0", "1 first.blocks.1", "2 first.blocks.2",
                                           "4 second.blocks.1"});
}

TEST_CASE("a model of deferred blocks takes memory of its parts and of one block",
          "[shards][blocks][deferred]") {
  constexpr int kRanks = 2;
  constexpr int64_t kBlocks = 16, kWidth = 64;
  const int64_t block_bytes = 4 * ((kWidth + 1) * (kWidth + 2) + (kWidth + 3) * kWidth + 1);
  const CountedCpuMemory counted;
  const int64_t before = CountedCpuMemory::live();
  const auto worlds = Communicator::in_process(kRanks);
  std::vector<OddModel> models;
  std::vector<std::unique_ptr<FusedAdamW>> optimizers;
  CountedCpuMemory::reset_peak();
  for (int rank = 0; rank < kRanks; ++rank) {
    OddOptions none;
    none.depth = 0;
    OddModel model(none);
    for (int i = 0; i < kBlocks; ++i) {
      model->blocks->push_back(OddBlock(kWidth));
      defer_initialization(*model->blocks[i], at::kCPU);
    }
    models.push_back(model);
    optimizers.push_back(std::make_unique<FusedAdamW>(parameters_of(*model), FusedAdamWOptions(0.01)));
  }
  REQUIRE(CountedCpuMemory::peak() - before < 3 * block_bytes);
  CountedCpuMemory::reset_peak();
  std::vector<std::unique_ptr<Session>> sessions(kRanks);
  REQUIRE(first_of(run_ranks(kRanks, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            sessions[r] = std::make_unique<Session>(*models[r], *optimizers[r], worlds[r]);
            sessions[r]->use(Shards(models[r]->blocks, ShardsOptions().materialize(drawn())));
            (void)sessions[r]->begin(torch::ones({1, 5}));
          })) == "");
  // All parts are one model; each rank has one block more, and a message of its values. Whole models take 2 MB.
  constexpr int64_t kOfSessions = 128 << 10;
  REQUIRE(CountedCpuMemory::peak() - before < (kBlocks + kRanks * 2) * block_bytes + kOfSessions);
}

TEST_CASE("ranks take over rank 0's values of a block, or are told where theirs differ",
          "[shards][blocks][deferred][errors]") {
  Plan plan;
  const auto wanted = trained(whole(plan));
  plan.on_others = [](const DeferredBlock& block) {
    draw_all(block.module);
    block.module.parameters()[0].fill_(7);
  };
  require_same(trained(plan), wanted);
  plan.initial = InitialParameters::check;
  const std::string message = run(plan);
  INFO(message);
  REQUIRE(message.find("initial value of parameter blocks.0.scale") != std::string::npos);
}

TEST_CASE("a seed and an index make a block's values, and the generator goes on as before", "[deferred]") {
  const auto drawn_of = [](uint64_t seed, size_t index) {
    torch::nn::Linear layer(4, 4);
    const at::NoGradGuard no_grad;
    reset_blocks<torch::nn::LinearImpl>(seed)({*layer, index, ""});
    return layer->weight;
  };
  torch::manual_seed(9);
  const Tensor next = torch::rand({3});
  torch::manual_seed(9);
  OddBlock block(5);
  torch::manual_seed(9);
  seeded_blocks(1, [](torch::nn::Module&) { (void)torch::randn({5}); })({*block, 0, ""});
  REQUIRE(torch::rand({3}).equal(next));
  REQUIRE(drawn_of(1, 0).equal(drawn_of(1, 0)));
  REQUIRE(!drawn_of(1, 0).equal(drawn_of(1, 1)));
  REQUIRE(!drawn_of(1, 0).equal(drawn_of(2, 0)));
}

TEST_CASE("whoever touches a parameter without values is told its name",
          "[shards][blocks][deferred][mistakes]") {
  using Catch::Matchers::Contains;
  OddModel model = model_of(Plan());
  Tensor scale = model->blocks->ptr(0)->parameters()[0];
  REQUIRE(is_deferred(scale));
  const auto says = Contains("parameter scale has no values yet");
  REQUIRE_THROWS_WITH(scale.detach().add_(1), says);
  REQUIRE_THROWS_WITH(scale.sum(), says);
  REQUIRE_THROWS_WITH(model->to(at::kDouble), Contains("has no values yet"));
  defer_initialization(*model->blocks, torch::dtype(at::kBFloat16));
  REQUIRE(scale.scalar_type() == at::kBFloat16);
  model->to(at::kCPU, at::kBFloat16);
  REQUIRE(is_deferred(scale));
  REQUIRE(model->head->weight.scalar_type() == at::kBFloat16);
}

TEST_CASE("mistakes with deferred blocks are told in a sentence", "[shards][blocks][deferred][mistakes]") {
  const auto nothing = [](OddModel&) {};
  const auto with = [](const MaterializeBlock& f) {
    return [f](Session& session, OddModel& model) {
      ShardsOptions options;
      if (f) options.materialize(f);
      session.use(Shards(model->blocks, options));
    };
  };
  const auto spoiling = [&](const std::function<void(Tensor&)>& spoil) {
    return with([spoil](const DeferredBlock& block) {
      draw_all(block.module);
      spoil(block.module.parameters()[1]);
    });
  };
  struct Row {
    Spoil spoil;
    Use use;
    std::vector<std::string> says;
  };
  const std::vector<Row> table = {
      {nothing,
       [](Session&, OddModel&) {},
       {"parameter blocks.0.scale has no values", "Shards(model->blocks"}},
      {nothing,
       [](Session& s, OddModel&) { s.use(DataParallel()); },
       {"has no values", "Shards(model->blocks"}},
      {nothing, [](Session& s, OddModel&) { s.use(Shards()); }, {"has no values", "Shards(model->blocks"}},
      {nothing, with(nullptr), {"parameter blocks.0.scale has no values", "ShardsOptions::materialize"}},
      {nothing, with([](const DeferredBlock&) {}), {"left parameter blocks.0.scale without values"}},
      {nothing,
       spoiling([](Tensor& p) { p.set_data(torch::zeros({3})); }),
       {"parameter blocks.0.up.weight", "shape"}},
      {nothing, spoiling([](Tensor& p) { p.set_data(p.to(at::kDouble)); }), {"blocks.0.up.weight", "Double"}},
      {nothing, with(reset_blocks<torch::nn::LinearImpl>(1)), {"LinearImpl", "OddBlock"}},
      {[](OddModel& m) { defer_initialization(*m->entry); },
       with(drawn()),
       {"entry.weight", "none of the blocks"}},
      {[](OddModel& m) { m = model_of(whole(Plan())); }, with(drawn()), {"this model has none"}},
      {[](OddModel& m) { defer_initialization(*OddBlock(5)->up, at::kMeta), (void)m; },
       with(drawn()),
       {"meta"}},
      {nothing,
       [](Session& s, OddModel&) { s.use(Shards(ShardsOptions().materialize(drawn()))); },
       {"give Shards the model's Blocks"}},
  };
  for (const Row& row : table) {
    INFO(&row - table.data());
    REQUIRE(fault_of(heard(row.spoil, row.use), row.says) == "");
  }
}

}  // namespace pacer::testing::deferred
