// Shards of parameters: odd models train as whole ones, to the bit; when parameters come and go, what is sent
// for them, and the memory that they take.
#include <pacer/parallel/shards.h>
#include <pacer/parallel/training_memory.h>

#include "support/catch.h"
#include "support/cpu_memory.h"
#include "support/modules/odd_blocks.h"
#include "support/parallel/shard_runs.h"

namespace pacer::testing {
namespace {

using UseOdd = std::function<void(Session&, OddModel&)>;

// The weights of each rank after so many steps.
std::vector<std::vector<Tensor>> trained(const OddOptions& odd, int world_size, const UseOdd& use,
                                         int64_t steps = 4) {
  const auto worlds =
      Communicator::in_process(world_size, CommunicatorOptions().timeout(std::chrono::seconds(30)));
  std::vector<OddModel> models;
  for (int rank = 0; rank < world_size; ++rank) {
    torch::manual_seed(5);
    models.emplace_back(odd);
  }
  std::vector<std::vector<Tensor>> values(static_cast<size_t>(world_size));
  const auto messages = run_ranks(world_size, [&](int rank) {
    OddModel& model = models[static_cast<size_t>(rank)];
    FusedAdamW optimizer(parameters_of(*model), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    use(session, model);
    for (int64_t step = 0; step < steps;) {
      auto [x] = session.begin(torch::arange(20, torch::kFloat).view({4, 5}) / 20 + rank + step);
      session.backward(model->forward(x).square().mean());
      if (session.step()) ++step;
    }
    session.finish();
    const auto whole = session.whole_parameters();
    for (const Tensor& parameter : model->parameters()) {
      values[static_cast<size_t>(rank)].push_back(parameter.detach().clone());
    }
  });
  REQUIRE(first_of(messages) == "");
  return values;
}

void require_same(const std::vector<Tensor>& a, const OddOptions& odd, int world_size, const UseOdd& found) {
  for (const auto& b : trained(odd, world_size, found)) {
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i) REQUIRE(a[i].equal(b[i]));
  }
}

}  // namespace

TEST_CASE("blocks of odd parameters, shared out, train as whole ones, to the bit", "[shards][blocks]") {
  std::vector<std::pair<std::string, OddOptions>> table;
  const auto add = [&](const char* name, const std::function<void(OddOptions&)>& set) {
    table.emplace_back(name, OddOptions());
    set(table.back().second);
  };
  add("plain", [](OddOptions&) {});
  add("one block", [](OddOptions& o) { o.depth = 1; });
  add("a frozen layer in each block", [](OddOptions& o) { o.frozen_first = true; });
  add("a frozen block", [](OddOptions& o) { o.frozen_block = true; });
  add("frozen layers behind an input without gradient",
      [](OddOptions& o) { o.frozen_first = o.no_input_gradient = true; });
  add("two dtypes", [](OddOptions& o) { o.double_block = true; });
  add("a parameter of a block and the head", [](OddOptions& o) { o.tied = true; });
  add("a block without parameters", [](OddOptions& o) { o.empty_block = true; });
  add("a block twice", [](OddOptions& o) { o.twice = true; });
  add("a block twice, with a frozen layer", [](OddOptions& o) { o.twice = o.frozen_first = true; });
  add("a region of several blocks", [](OddOptions& o) { o.region = true; });
  add("a region with a block twice and frozen layers",
      [](OddOptions& o) { o.region = o.twice = o.frozen_first = true; });
  const UseOdd whole = [](Session& session, OddModel&) { session.use(DataParallel()); };
  const std::vector<std::pair<std::string, ShardsOptions>> ways = {
      {"prefetch 1", {}},
      {"prefetch 0", ShardsOptions().prefetch(0)},
      {"prefetch 3", ShardsOptions().prefetch(3)},
      {"kept after forward", ShardsOptions().keep_after_forward(true)}};
  const auto recomputed = [](const UseOdd& use, const KeptOperators& keep = {}) -> UseOdd {
    return [use, keep](Session& session, OddModel& model) {
      session.use(Recompute(model->blocks, RecomputeOptions().keep(keep)));
      use(session, model);
    };
  };
  const auto accumulated = [](const UseOdd& use) -> UseOdd {
    return [use](Session& session, OddModel& model) {
      session.use(GradientAccumulation(3));
      use(session, model);
    };
  };
  for (const auto& [name, odd] : table) {
    INFO(name);
    std::vector<std::vector<Tensor>> wanted;
    for (const int world_size : {1, 2, 3}) wanted.push_back(trained(odd, world_size, whole).front());
    std::vector<Tensor> wanted_recomputed;
    if (!odd.region) wanted_recomputed = trained(odd, 2, recomputed(whole)).front();
    const auto wanted_accumulated = trained(odd, 2, accumulated(whole)).front();
    for (const auto& [way, options] : ways) {
      INFO(way);
      const UseOdd parts = [&options](Session& session, OddModel& model) {
        session.use(Shards(model->blocks, options));
      };
      for (const int world_size : {1, 2, 3}) {
        require_same(wanted[static_cast<size_t>(world_size - 1)], odd, world_size, parts);
      }
      if (!odd.region) {
        for (const KeptOperators& keep : {KeptOperators(), KeptOperators{"aten::addmm"}}) {
          require_same(wanted_recomputed, odd, 2, recomputed(parts, keep));
        }
      }
      require_same(
          wanted_accumulated, odd, 2, accumulated([&](Session& session, OddModel& model) {
            session.use(Shards(model->blocks, ShardsOptions(options).reduce_every_micro_step(false)));
          }));
    }
  }
}

// g: gathers, r: adds gradients; 0: the root, then the blocks.
TEST_CASE("a block's parameters are on their way while its neighbour runs, forward and backward",
          "[shards][blocks]") {
  const auto history = [](const ShardsOptions& options, bool recomputes, int64_t micro_steps) {
    const auto worlds = Communicator::in_process(2);
    std::vector<std::string> found(2);
    REQUIRE(first_of(run_ranks(2, [&](int rank) {
              OddOptions odd;
              odd.depth = 4;
              OddModel model(odd);
              FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
              Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
              const auto shards = std::make_shared<Shards>(model->blocks, options);
              session.use(shards).use(GradientAccumulation(micro_steps));
              if (recomputes) session.use(Recompute(model->blocks));
              for (int64_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
                auto [x] = session.begin(torch::ones({2, 5}));
                session.backward(model->forward(x).square().mean());
                for (const auto& operation : shards->shards()->take_history()) {
                  const std::string line = shards->shards()->describe(operation);
                  const auto place = line.find("blocks.");
                  const std::string group =
                      place == std::string::npos ? "0" : std::to_string(line[place + 7] - '0' + 1);
                  found[static_cast<size_t>(rank)] += (line[0] == 'g' ? " g" : " r") + group;
                }
                session.step();
              }
            })) == "");
    REQUIRE(found[0] == found[1]);
    return found[0];
  };
  const std::string once = " g0 g1 g2 g3 g4 g4 g3 r4 g2 r3 g1 r2 r1 r0";
  CHECK(history({}, false, 1) == once);
  CHECK(history({}, true, 1) == once);
  CHECK(history({}, false, 2) == once + once);
  CHECK(history(ShardsOptions().prefetch(0), false, 1) == " g0 g1 g2 g3 g4 g4 r4 g3 r3 g2 r2 g1 r1 r0");
  CHECK(history(ShardsOptions().prefetch(2), false, 1) == " g0 g1 g2 g3 g4 g4 g3 g2 r4 g1 r3 r2 r1 r0");
  CHECK(history(ShardsOptions().keep_after_forward(true), false, 2) ==
        " g0 g1 g2 g3 g4 r4 r3 r2 r1 r0 r4 r3 r2 r1 r0");
  CHECK(history(ShardsOptions().reduce_every_micro_step(false), false, 2) ==
        " g0 g1 g2 g3 g4 g4 g3 g2 g1" + once);
}

// Results that backward reaches at different times, an argument that comes back as it is, a frozen layer, and
// a module that is used outside, too.
TEST_CASE("a block leaves as soon as backward is through it, whatever it returns", "[shards][blocks]") {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() {
      register_module("blocks", blocks);
      register_module("entry", entry);
      for (int i = 0; i < 4; ++i) blocks->push_back(OddBlock(5));
      for (Tensor& parameter : blocks->at<OddBlockImpl>(2).up->parameters()) parameter.requires_grad_(false);
      outside = register_module("outside", blocks->at<OddBlockImpl>(3).down);
    }
    Blocks blocks;
    torch::nn::Linear entry{5, 5}, outside{nullptr};
  };
  for (const bool keeps : {false, true}) {
    const auto worlds = Communicator::in_process(2);
    const auto messages = run_ranks(2, [&](int rank) {
      torch::manual_seed(5);
      ModelImpl model;
      FusedAdamW optimizer(parameters_of(model), FusedAdamWOptions(0.01));
      Session session(model, optimizer, worlds[static_cast<size_t>(rank)]);
      const auto hook =
          std::make_shared<Shards>(model.blocks, ShardsOptions().prefetch(0).keep_after_forward(keeps));
      session.use(hook);
      if (keeps) session.use(Recompute(model.blocks));
      auto [x] = session.begin(torch::ones({2, 5}));
      const Tensor memory = model.entry(x);
      Tensor h = memory, same = memory, losses = torch::zeros({});
      for (size_t i = 0; i < 4; ++i) {
        const auto block = [&blocks = model.blocks, i](const Tensor& in, const Tensor& side) {
          const auto& own = blocks->at<OddBlockImpl>(i);
          const Tensor early = (in * own.scale).square().mean();
          return std::make_tuple(blocks->at<OddBlockImpl>(i).forward(in), side, early);
        };
        Tensor early;
        std::tie(h, same, early) = model.blocks->run(i, block, h, same);
        losses = losses + early;
      }
      std::string left;
      memory.register_hook([&](const Tensor&) {
        for (size_t group = 1; group <= 4; ++group) {
          if (hook->shards()->is_gathered(group)) left += " " + std::to_string(group);
        }
      });
      session.backward((h + same + model.outside(torch::cat({h, h}, 1).narrow(1, 0, 7))).square().mean() +
                       losses);
      require(left.empty(), "still there:", left);
      size_t gathers = 0;
      for (const auto& operation : hook->shards()->take_history()) {
        gathers += operation.kind == ParameterShards::Operation::Kind::gather;
      }
      require(gathers == (keeps ? 5 : 9), gathers, " gathers");
      session.step();
      session.finish();
    });
    REQUIRE(first_of(messages) == "");
  }
}

// Gathers of blocks forward and backward, of the root once, and sums of all.
TEST_CASE("what Shards of parameters sends is known beforehand, and nothing for a dropped block",
          "[shards][blocks][session]") {
  using namespace shards;
  constexpr int kRanks = 4;
  for (const char* hook : {"", "layer drop"}) {
    const auto hooks = *hook ? hooks_named({hook}) : std::vector<RegisteredHook>();
    Runs runs = runs_of(shared_optimizers()[0], hooks, kRanks, sharded(Sharded::parameters));
    REQUIRE(step_all(runs) == "");
    const auto part_bytes = [&](size_t group) {
      std::vector<int64_t> counts;
      for (const auto& part : runs[0]->parts->find<Shards>()->shards()->parts()) {
        if (part.group == group) counts.push_back(part.parameter.numel());
      }
      return ShardLayout(counts, kRanks).part_elements() * 4;
    };
    int64_t dropped = 0;
    for (int step = 0; step < 8; ++step) {
      const Traffic gathered = traffic_of(*runs[0]->world, "all_gather"),
                    reduced = traffic_of(*runs[0]->world, "reduce_scatter");
      const Progress now = runs[0]->session->progress();
      const auto absent = runs[0]->parts->unused(now);
      int64_t blocks = 0;
      for (size_t i = 0; i < 3; ++i) {
        const bool is_kept = std::none_of(absent.begin(), absent.end(), [&](const Tensor& parameter) {
          return parameter.is_same(runs[0]->model->blocks[i]->weight);
        });
        blocks += is_kept;
        dropped += !is_kept;
      }
      REQUIRE(step_all(runs) == "");
      const int64_t sums = (kRanks - 1) * (part_bytes(0) + blocks * part_bytes(1));
      REQUIRE(traffic_of(*runs[0]->world, "reduce_scatter").bytes_sent - reduced.bytes_sent == sums);
      const int64_t norm = norm_bytes(*runs[0], runs[0]->world->world_size());  // finite_check
      REQUIRE(traffic_of(*runs[0]->world, "all_gather").bytes_sent - gathered.bytes_sent ==
              sums + (kRanks - 1) * blocks * part_bytes(1) + norm);
    }
    REQUIRE((dropped > 0) == (*hook != 0));
  }
}

// What all ranks together have allocated, at the peak of a step and between steps. Beside the plan:
// activations, a gradient before it reaches its block's memory, padding to 128 W elements, and what
// operations need.
TEST_CASE("Shards of parameters takes the memory that training_memory says", "[shards][blocks][session]") {
  constexpr int kRanks = 4;
  static constexpr int64_t kBlocks = 24, kWide = 128, kLayer = kWide * (kWide + 1);
  struct StackImpl : torch::nn::Module {
    StackImpl() {
      register_module("entry", entry);
      register_module("blocks", blocks);
      register_module("head", head);
      for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(torch::nn::Linear(kWide, kWide));
    }
    Tensor forward(Tensor x) {
      x = entry(x);
      for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &torch::nn::LinearImpl::forward, x);
      return head(x);
    }
    torch::nn::Linear entry{kWide, kWide}, head{kWide, kWide};
    Blocks blocks;
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t prefetch : {0, 1}) {
      const CountedCpuMemory memory;
      const int64_t before = CountedCpuMemory::live();
      const auto worlds = Communicator::in_process(kRanks);
      std::vector<std::unique_ptr<StackImpl>> models;
      std::vector<std::unique_ptr<FusedAdamW>> optimizers;
      std::vector<std::unique_ptr<Session>> sessions;
      for (const auto& world : worlds) {
        models.push_back(std::make_unique<StackImpl>());
        models.back()->to(dtype);
        optimizers.push_back(
            std::make_unique<FusedAdamW>(models.back()->parameters(), FusedAdamWOptions(0.01)));
        sessions.push_back(std::make_unique<Session>(*models.back(), *optimizers.back(), world));
        sessions.back()->use(Shards(models.back()->blocks, ShardsOptions().prefetch(prefetch)));
      }
      const auto step = [&](int rank) {
        const auto r = static_cast<size_t>(rank);
        auto [x] = sessions[r]->begin(torch::ones({1, kWide}, dtype));
        sessions[r]->backward(models[r]->forward(x).square().mean());
        sessions[r]->step();
      };
      REQUIRE(first_of(run_ranks(kRanks, step)) == "");
      CountedCpuMemory::reset_peak();
      REQUIRE(first_of(run_ranks(kRanks, step)) == "");
      const int64_t found = (CountedCpuMemory::peak() - before) / kRanks;
      const TrainingMemory plan = training_memory(TrainingMemoryOptions((kBlocks + 2) * kLayer)
                                                      .ranks(kRanks)
                                                      .dtype(dtype)
                                                      .sharded(Sharded::parameters)
                                                      .largest_block(kLayer)
                                                      .outside_blocks(2 * kLayer)
                                                      .prefetch(prefetch));
      const int64_t layer = kLayer * static_cast<int64_t>(c10::elementSize(dtype));
      CAPTURE(dtype, prefetch, plan.total(), found, layer);
      CHECK(found < plan.total() + plan.total() / 50 + 3 * layer);
      CHECK(found > plan.total() - 2 * layer);
    }
  }
}

}  // namespace pacer::testing
