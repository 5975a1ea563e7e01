// Shards in a Session: against DataParallel, to the bit, with every optimizer that ranks can share and every
// pair of hooks; what it sends; checkpoints of any number of ranks.
#include <array>
#include <filesystem>
#include <set>
#include <tuple>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/parallel/shards.h>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/parallel/shard_runs.h"
#include "support/samples.h"
#include "support/session/hook_pairs.h"
#include "support/temporary_folder.h"

namespace pacer::testing {

TEST_CASE("with every optimizer and every pair of hooks, Shards trains as DataParallel, to the bit",
          "[shards][session][data_parallel]") {
  using namespace shards;
  const auto optimizers = shared_optimizers();
  REQUIRE(optimizers.size() == 25);
  const std::array<Sharded, 3> ways = {Sharded::state, Sharded::gradients, Sharded::parameters};
  int world_size = 1;
  size_t turn = 0, trained = 0;
  for (const auto& pair : hooks_and_pairs(/*one_in=*/7, /*first=*/2)) {
    world_size = world_size % 4 + 1;
    ++turn;
    const bool accumulates =
        std::any_of(pair.begin(), pair.end(), [](const auto& hook) { return hook.kind == "accumulation"; });
    for (size_t i = 0; i < ways.size(); ++i) {
      // Pairs take turns with them; in a long run every pair has all three.
      if ((turn + i) % ways.size() != 0 && !wants_long_tests()) continue;
      const Sharded what = ways[i];
      // Added over ranks in every micro-step, gradients add up in another order; see below.
      if (what == Sharded::gradients && accumulates) continue;
      const bool once = accumulates && what == Sharded::parameters;
      const Adds add = !once ? sharded(what) : [](SmallRun& run) {
        run.session->use(Shards(run.model->stack, ShardsOptions().reduce_every_micro_step(false)));
      };
      const RegisteredOptimizer& optimizer = optimizers[trained++ % optimizers.size()];
      INFO(optimizer.name << ", " << names_of(pair) << ", " << world_size << " ranks, " << name_of(what));
      Runs wanted = runs_of(optimizer, pair, world_size, data_parallel);
      Runs found = runs_of(optimizer, pair, world_size, add);
      for (int step = 0; step < 5; ++step) {
        REQUIRE(step_all(wanted) == "");
        REQUIRE(step_all(found) == "");
        REQUIRE(model_difference(wanted, found) == "");
        REQUIRE(found[0]->session->progress().tokens == wanted[0]->session->progress().tokens);
      }
    }
  }
}

// Groups of matrices and of vectors would keep every unit back until the last gradient of a vector is there.
TEST_CASE("parts lie in the order of the model, however groups have sorted its parameters",
          "[shards][session]") {
  using namespace shards;
  Runs runs = runs_of(shared_optimizers()[0], {}, 2, sharded(Sharded::gradients));
  REQUIRE(step_all(runs) == "");
  const auto parts = runs[0]->parts->find<Shards>()->shards()->parts();
  const auto of_model = runs[0]->model->parameters();
  REQUIRE(parts.size() == of_model.size());
  for (size_t i = 0; i < parts.size(); ++i) CHECK(parts[i].parameter.is_same(of_model[i]));
}

TEST_CASE("a gradient that is not finite on one rank changes nothing on any", "[shards][session]") {
  using namespace shards;
  const auto optimizers = shared_optimizers();
  const auto add = [](const Adds& way) {
    return [way](SmallRun& run) {
      way(run);
      run.session->use(SpoiledLoss(run.world->rank() == 1 ? 2 : -1));
    };
  };
  for (const Sharded what : {Sharded::gradients, Sharded::parameters}) {
    Runs wanted = runs_of(optimizers[0], hooks_named({"clipping"}), 3, add(data_parallel));
    Runs found = runs_of(optimizers[0], hooks_named({"clipping"}), 3, add(sharded(what)));
    for (int step = 0; step < 5; ++step) {
      const NamedTensors before = models_of(found).front();
      REQUIRE(step_all(wanted) == "");
      REQUIRE(step_all(found) == "");
      REQUIRE(model_difference(wanted, found) == "");
      REQUIRE((first_difference(before, models_of(found).front()) == "") == (step == 2));
    }
    for (auto& run : found) REQUIRE(run->session->skipped_steps() == 1);
  }
}

// Tensors of which several ranks have a part, and units of the norm that their bounds cut; those of the
// registry are each one rank's.
TEST_CASE("large tensors train and resume as whole ones, to the bit", "[shards][session][resume]") {
  const auto trained = [](int world_size, bool sharded, const std::string& folder, int64_t steps,
                          bool resumes, const FusedAdamWOptions& options) {
    RankSetup setup;
    setup.widths = {300, 350, 7};
    setup.reduction = [sharded](Session& session) {
      if (sharded) {
        session.use(Shards(ShardsOptions().unit_bytes(4000)));
      } else {
        session.use(DataParallel());
      }
    };
    setup.hooks = [&](Session& session) {
      session.use(GradientClipping(0.01));
      session.use(Checkpoints(CheckpointsOptions(folder).every(3).synchronous(true)));
    };
    setup.options = options;
    const CapturedStderr quiet;
    auto trainers = trainers_of(std::vector<RankSetup>(static_cast<size_t>(world_size), setup));
    REQUIRE(first_of(run_all(trainers, [&](RankTrainer& t, int rank) {
              if (resumes) require(t.session->resume() == 3, "nothing was resumed");
              t.inputs = torch::arange(600, torch::kFloat).view({2, 300}) / 300 + rank;
              for (int64_t step = 0; step < steps; ++step) t.step();
            })) == "");
    auto values = trainers.front()->snapshot();
    for (auto& trainer : trainers) {
      const auto others = trainer->snapshot();
      for (size_t i = 0; i < values.size(); ++i) REQUIRE(others[i].equal(values[i]));
    }
    return values;
  };
  const auto check = [&](int world_size, const FusedAdamWOptions& before, const FusedAdamWOptions& later) {
    const TemporaryFolder whole, parts;
    const auto wanted = trained(world_size, false, whole.path(), 3, false, before);
    const auto found = trained(world_size, true, parts.path(), 3, false, before);
    for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(found[i].equal(wanted[i]));
    for (const int after : {1, 2, 4}) {
      const TemporaryFolder a, b;
      std::filesystem::copy(whole.path(), a.path(), std::filesystem::copy_options::recursive);
      std::filesystem::copy(parts.path(), b.path(), std::filesystem::copy_options::recursive);
      const auto next = trained(after, false, a.path(), 3, true, later),
                 also = trained(after, true, b.path(), 3, true, later);
      for (size_t i = 0; i < next.size(); ++i) REQUIRE(also[i].equal(next[i]));
    }
  };
  const FusedAdamWOptions plain(0.01);
  const auto amsgrad = FusedAdamWOptions(plain).amsgrad(true),
             in_8_bits = FusedAdamWOptions(plain).state_bits(8);
  for (const int world_size : {2, 3, 5, 9}) check(world_size, amsgrad, amsgrad);
  for (const int world_size : {3, 5}) check(world_size, in_8_bits, in_8_bits);
  check(3, in_8_bits, plain);
  check(3, plain, in_8_bits);
}

// Tensors of several units, of which several ranks have some, and a block that is gathered.
TEST_CASE("LAMB's norms are those of whole tensors, to the bit", "[shards][lamb]") {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() {
      register_module("blocks", blocks);
      register_module("head", head);
      for (int i = 0; i < 2; ++i) blocks->push_back(torch::nn::Linear(300, 300));
    }
    Tensor forward(Tensor x) {
      for (size_t i = 0; i < 2; ++i) x = blocks->run(i, &torch::nn::LinearImpl::forward, x);
      return head(x);
    }
    torch::nn::Linear head{300, 7};
    Blocks blocks;
  };
  using Use = std::function<void(Session&, ModelImpl&)>;
  const auto trained = [](int world_size, at::ScalarType dtype, const Use& use, int64_t bits) {
    const auto worlds = Communicator::in_process(world_size);
    std::vector<std::shared_ptr<ModelImpl>> models;
    torch::manual_seed(3);
    for (int rank = 0; rank < world_size; ++rank) models.push_back(std::make_shared<ModelImpl>());
    std::vector<std::vector<Tensor>> values(worlds.size());
    std::vector<std::vector<double>> ratios(worlds.size());
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              const auto r = static_cast<size_t>(rank);
              models[r]->to(dtype);
              FusedLamb optimizer(models[r]->named_parameters(),
                                  FusedLambOptions(0.01).weight_decay(0.1).state_bits(bits));
              Session session(*models[r], optimizer, worlds[r]);
              session.use(GradientClipping(0.1));
              use(session, *models[r]);
              for (int step = 0; step < 4; ++step) {
                auto [x] = session.begin((torch::arange(600).view({2, 300}) / 300 + rank + step).to(dtype));
                session.backward(models[r]->forward(x).to(at::kFloat).square().mean());
                session.step();
              }
              session.finish();
              for (const Tensor& p : models[r]->parameters()) ratios[r].push_back(optimizer.trust_ratio(p));
              const auto whole = session.whole_parameters();
              for (const Tensor& p : models[r]->parameters()) values[r].push_back(p.detach().clone());
            })) == "");
    for (size_t r = 1; r < values.size(); ++r) {
      for (size_t i = 0; i < values[0].size(); ++i) REQUIRE(values[r][i].equal(values[0][i]));
      REQUIRE(ratios[r] == ratios[0]);
    }
    return std::make_pair(values[0], ratios[0]);
  };
  const Use whole = [](Session& session, ModelImpl&) { session.use(DataParallel()); };
  const Use state = [](Session& session, ModelImpl&) {
    session.use(Shards(ShardsOptions().what(Sharded::state)));
  };
  const Use parameters = [](Session& session, ModelImpl& model) { session.use(Shards(model.blocks)); };
  const std::tuple<int, at::ScalarType, int64_t> cases[] = {
      {2, at::kFloat, 32},    {3, at::kFloat, 32},    {5, at::kFloat, 32}, {2, at::kBFloat16, 32},
      {3, at::kBFloat16, 32}, {5, at::kBFloat16, 32}, {3, at::kFloat, 8},  {5, at::kBFloat16, 8}};
  for (const auto& [world_size, dtype, bits] : cases) {
    const auto wanted = trained(world_size, dtype, whole, bits);
    for (const Use& use : {state, parameters}) {
      CAPTURE(dtype, world_size, bits);
      const auto found = trained(world_size, dtype, use, bits);
      for (size_t i = 0; i < wanted.first.size(); ++i) REQUIRE(found.first[i].equal(wanted.first[i]));
      REQUIRE(found.second == wanted.second);
    }
  }
}

TEST_CASE("gradients that travel in every micro-step add up to those that travel once", "[shards][session]") {
  using namespace shards;
  for (const char* hook : {"accumulation", "accumulation by tokens"}) {
    for (const Sharded what : {Sharded::gradients, Sharded::parameters}) {
      Runs once = runs_of(shared_optimizers()[0], hooks_named({hook}), 3, sharded(Sharded::state));
      Runs always = runs_of(shared_optimizers()[0], hooks_named({hook}), 3, sharded(what));
      for (int step = 0; step < 4; ++step) {
        REQUIRE(step_all(once) == "");
        REQUIRE(step_all(always) == "");
        const auto a = models_of(once).front(), b = models_of(always).front();
        // Adam divides by the root of the second moment, so a gradient near zero is as large as any other.
        for (const auto& [name, tensor] : a) REQUIRE(tensor.allclose(b.at(name), 1e-3, 1e-4));
        REQUIRE(model_difference(always, always) == "");
      }
    }
  }
}

TEST_CASE("a window that ends early takes its step with what it has", "[shards][session]") {
  using namespace shards;
  for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
    Runs wanted = runs_of(shared_optimizers()[0], hooks_named({"accumulation"}), 2, data_parallel);
    Runs found = runs_of(shared_optimizers()[0], hooks_named({"accumulation"}), 2, sharded(what));
    for (Runs* runs : {&wanted, &found}) {
      REQUIRE(step_all(*runs) == "");
      REQUIRE(on_all(*runs, [](SmallRun& run) {
                const auto batch = run.next_batch();
                auto [x, y] = run.session->begin(batch.first, batch.second);
                run.session->backward(run.model->loss(x, y));
                run.session->step();
                run.session->finish();
              }) == "");
    }
    const auto a = models_of(wanted).front(), b = models_of(found).front();
    for (const auto& [name, tensor] : a) REQUIRE(tensor.allclose(b.at(name), 1e-3, 1e-4));
    REQUIRE(found[0]->session->progress().step == 2);
  }
}

TEST_CASE("Shards sends what DataParallel sends", "[shards][session]") {
  using namespace shards;
  constexpr int kRanks = 4, kSteps = 3;
  Runs runs = runs_of(shared_optimizers()[0], {}, kRanks, sharded(Sharded::gradients));
  REQUIRE(step_all(runs) == "");
  const auto before = [&](const char* operation) { return traffic_of(*runs[0]->world, operation); };
  const Traffic reduced = before("reduce_scatter"), gathered = before("all_gather");
  for (int step = 0; step < kSteps; ++step) REQUIRE(step_all(runs) == "");
  const auto shards = runs[0]->parts->find<Shards>()->shards();
  REQUIRE(shards != nullptr);
  int64_t elements = 0;
  for (const auto& unit : shards->units()) {
    std::vector<int64_t> counts;
    for (const std::string& name : unit) counts.push_back(runs[0]->model->named_parameters()[name].numel());
    elements += ShardLayout(counts, kRanks).elements();
  }
  const auto units = static_cast<int64_t>(shards->units().size());
  REQUIRE(units > 1);
  const int64_t sent = kSteps * elements * 4 * (kRanks - 1) / kRanks;
  REQUIRE(before("reduce_scatter").bytes_sent - reduced.bytes_sent == sent);
  const int64_t norms = kSteps * norm_bytes(*runs[0], runs[0]->world->world_size());  // finite_check
  REQUIRE(before("all_gather").bytes_sent - gathered.bytes_sent == sent + norms);
  REQUIRE(before("reduce_scatter").calls - reduced.calls == kSteps * units);
}

TEST_CASE("checkpoints of any number of ranks, sharded or not, are resumed by any other",
          "[shards][session][resume][ranks]") {
  using namespace shards;
  const auto optimizers = shared_optimizers();
  const auto hooks = hooks_named({"clipping", "learning rate", "sampler"});
  const auto runs_in = [&](const std::string& folder, const RegisteredOptimizer& optimizer, int world_size,
                           const Adds& way, bool synchronous) {
    return runs_of(optimizer, hooks, world_size, [&, way](SmallRun& run) {
      if (world_size > 1) way(run);
      run.session->use(Checkpoints(CheckpointsOptions(folder).every(3).keep(100).synchronous(synchronous)));
    });
  };
  const auto resume = [](Runs& runs) {
    const CapturedStderr quiet;
    return on_all(runs, [](SmallRun& run) {
      require(run.session->resume() == 3, "nothing was resumed");
      run.sampler.reset();
    });
  };
  size_t next = 0;
  Turns turns(2);
  for (const int before : {1, 2, 3, 4, 7}) {
    for (const std::optional<Sharded> saves :
         {std::optional<Sharded>(), std::optional(Sharded::gradients), std::optional(Sharded::parameters)}) {
      if (before == 1 && saves) continue;
      const RegisteredOptimizer& optimizer = optimizers[next++ % optimizers.size()];
      const TemporaryFolder folder;
      Runs saved = runs_in(folder.path(), optimizer, before, saves ? sharded(*saves) : Adds(data_parallel),
                           next % 2 == 0);
      for (int step = 0; step < 3; ++step) REQUIRE(step_all(saved) == "");
      saved.clear();
      for (const int after : {1, 2, 3, 4, 7}) {
        if (!turns.is_next()) continue;
        INFO(optimizer.name << ", from " << before << " " << (saves ? name_of(*saves) : "replicas") << " to "
                            << after);
        const TemporaryFolder a, b;
        for (const TemporaryFolder* copy : {&a, &b}) {
          std::filesystem::copy(folder.path(), copy->path(), std::filesystem::copy_options::recursive);
        }
        Runs wanted = runs_in(a.path(), optimizer, after, data_parallel, true);
        Runs found = runs_in(b.path(), optimizer, after,
                             sharded(after % 2 == 0 ? Sharded::state : Sharded::parameters), true);
        REQUIRE(resume(wanted) == "");
        REQUIRE(resume(found) == "");
        for (int step = 0; step < 3; ++step) {  // the last one saves
          REQUIRE(model_difference(wanted, found) == "");
          REQUIRE(step_all(wanted) == "");
          REQUIRE(step_all(found) == "");
        }
        REQUIRE(model_difference(wanted, found) == "");
        // What both then save is the same, too.
        const auto whole = [&](const TemporaryFolder& of, Runs& runs) {
          return detail::read_state(*runs[0]->parts, detail::find_newest(of.path())).optimizer;
        };
        REQUIRE(first_difference(whole(a, wanted), whole(b, found)) == "");
      }
    }
  }
}

TEST_CASE("ranks that keep parts of the parameters each write some of them, with an index",
          "[shards][blocks][session][resume]") {
  using namespace shards;
  const TemporaryFolder folder;
  Runs runs = runs_of(shared_optimizers()[0], {}, 3, [&](SmallRun& run) {
    sharded(Sharded::parameters)(run);
    run.session->use(Checkpoints(CheckpointsOptions(folder.path()).every(1)));
  });
  REQUIRE(step_all(runs) == "");
  REQUIRE(on_all(runs, [](SmallRun& run) { run.session->finish(); }) == "");
  const NamedTensors wanted = models_of(runs).front();
  const std::string newest = detail::find_newest(folder.path());
  const auto index = nlohmann::json::parse(content_of(newest + "/model.safetensors.index.json"));
  int64_t bytes = 0;
  std::set<std::string> files;
  for (const auto& [name, tensor] : wanted) {
    const std::string file = index.at("weight_map").at(name);
    FileReader reader(posix_file_system(), newest + "/" + file);
    const NamedTensors stored = detail::read_tensors(reader, file);
    REQUIRE(stored.at(name).equal(tensor));
    bytes += static_cast<int64_t>(tensor.nbytes());
    files.insert(file);
  }
  CHECK(files == std::set<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                       "model-00003-of-00003.safetensors"});
  CHECK(index.at("weight_map").size() == wanted.size());
  CHECK(index.at("metadata").at("total_size") == bytes);
  SmallModel other = small_model();
  const LoadedWeights loaded = load_weights(*other, folder.path());
  CHECK(loaded.loaded.size() == wanted.size());
  CHECK(loaded.file == newest);
  REQUIRE(first_difference(detail::model_tensors(*other), wanted) == "");
  std::filesystem::remove(newest + "/model-00002-of-00003.safetensors");
  CHECK_THROWS_AS(load_weights(*other, newest), FileError);
}

TEST_CASE("ranks that do not train alike hear of it, in every micro-step", "[shards][session][ranks]") {
  for (const bool accumulates : {false, true}) {
    RankSetup setup;
    setup.reduction = [=](Session& session) {
      session.use(Shards());
      if (accumulates) session.use(GradientAccumulation(2));
    };
    auto trainers = trainers_of(std::vector<RankSetup>(3, setup),
                                CommunicatorOptions().timeout(std::chrono::seconds(20)));
    const auto messages = run_all(trainers, [](RankTrainer& t, int rank) {
      t.step();
      if (rank == 1) return t.session->finish();
      t.step();
    });
    CAPTURE(messages);
    for (const std::string& message : messages) REQUIRE(message.find("no more data") != std::string::npos);
  }
}

TEST_CASE("a second Session goes on with the parts of the first", "[shards][session]") {
  std::vector<Tensor> wanted;
  for (const bool in_two : {false, true}) {
    RankSetup setup;
    setup.reduction = [](Session& session) { session.use(Shards()); };
    auto trainers = trainers_of(std::vector<RankSetup>(2, setup));
    REQUIRE(first_of(run_all(trainers, [&](RankTrainer& t, int) {
              t.step();
              if (in_two) {
                t.session->finish();
                const auto world = t.parts->shared_world();
                t.session.reset();
                t.session = std::make_unique<Session>(*t.model, *t.optimizer, world);
                t.session->use(Shards());
              }
              t.step();
            })) == "");
    if (!in_two) wanted = trainers[0]->snapshot();
    const auto found = trainers[1]->snapshot();
    for (size_t i = 0; i < found.size(); ++i) REQUIRE(found[i].equal(wanted[i]));
  }
}

}  // namespace pacer::testing
