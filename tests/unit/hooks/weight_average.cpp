// Averages of weights: their values, where the model has them, and what a run keeps of them.
#include <cmath>
#include <stdexcept>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <pacer/checkpoints/all.h>
#include <pacer/hooks/update_batch_norm.h>
#include <pacer/hooks/weight_average.h>
#include <pacer/parallel/shards.h>
#include <pacer/session/all.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/message_of.h"
#include "support/parallel/shard_runs.h"
#include "support/session/mistakes.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// A run whose average the test keeps.
struct AveragedRun {
  explicit AveragedRun(const WeightAverageOptions& options, const std::string& optimizer = "FusedAdamW")
      : run(registered_optimizer(optimizer), {}), average(std::make_shared<WeightAverage>(options)) {
    run.session->use(average);
  }
  SmallRun run;
  std::shared_ptr<WeightAverage> average;
};

struct Cloud : torch::nn::Module {
  Cloud() { register_parameter("points", torch::zeros({3})); }
  const Tensor& points() { return parameters_["points"]; }
  void replace(const Tensor& points) { parameters_["points"] = points; }
};

NamedTensors weights_of(SmallRun& run) {
  NamedTensors weights;
  for (const auto& item : run.model->named_parameters()) weights[item.key()] = item.value().detach().clone();
  return weights;
}

// In fp64.
NamedTensors mixed(const NamedTensors& average, double share, const NamedTensors& weights) {
  NamedTensors result;
  for (const auto& [name, value] : average) {
    result[name] = value.to(at::kDouble) * share + weights.at(name).to(at::kDouble) * (1 - share);
  }
  return result;
}

double largest_error(const NamedTensors& found, const NamedTensors& wanted) {
  REQUIRE(found.size() == wanted.size());
  double largest = 0;
  for (const auto& [name, value] : wanted) {
    largest = std::max(largest,
                       (found.at(name).to(at::kDouble) - value.to(at::kDouble)).abs().max().item<double>());
  }
  return largest;
}

}  // namespace

TEST_CASE("averages of weights have the values of their definition", "[hooks][average]") {
  const struct {
    const char* name;
    WeightAverageOptions options;
    std::vector<double> shares;  // of the average, after each step; 0: a copy; 1: no update
  } cases[] = {
      {"exponential", ema(0.9), {0, 0.9, 0.9, 0.9, 0.9, 0.9}},
      {"warmed up", ema(0.25).warm_up(true), {0, 2.0 / 11, 0.25, 0.25, 0.25, 0.25}},
      {"decay 0", ema(0), {0, 0, 0, 0, 0, 0}},
      {"every second step", ema(0.9).every(2), {1, 0, 1, 0.9, 1, 0.9}},
      {"late", ema(0.9).from_step(4), {1, 1, 1, 0, 0.9, 0.9}},
      {"tail", tail_average(3), {1, 1, 0, 0.5, 2.0 / 3, 0.75}},
      {"tail, every second step", tail_average(3).every(2), {1, 1, 1, 0, 1, 0.5}},
  };
  for (const auto& each : cases) {
    for (const char* optimizer : {"FusedAdamW", "FusedAdamW bf16 remainder", "SGD"}) {
      INFO(each.name << ", " << optimizer);
      AveragedRun averaged(each.options, optimizer);
      NamedTensors wanted;
      int64_t updates = 0;
      for (const double share : each.shares) {
        averaged.run.step();
        if (share == 1) continue;
        ++updates;
        const NamedTensors weights = weights_of(averaged.run);
        wanted = mixed(wanted.empty() ? weights : wanted, share, weights);
      }
      CHECK(averaged.average->updates() == updates);
      // Six roundings of weights of about 1 to 24 bits.
      CHECK(largest_error(averaged.average->averages(), wanted) < 6e-7);
    }
  }
}

TEST_CASE("training with an average is training without it", "[hooks][average]") {
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    INFO(optimizer.name);
    SmallRun plain(optimizer, {}), averaged(optimizer, {});
    if (optimizer.averages) {
      CHECK(
          message_of<InvalidArgument>([&] { averaged.session->use(WeightAverage(ema(0.5))); }) ==
          "WeightAverage: the optimizer averages the weights itself, and evaluation sees that average; leave "
          "the hook out");
      continue;
    }
    averaged.session->use(WeightAverage(ema(0.5)));
    for (int step = 0; step < 4; ++step) {
      plain.step();
      averaged.step();
      averaged.session->evaluate([] {});
    }
    REQUIRE(first_difference(weights_of(plain), weights_of(averaged)) == "");
  }
}

TEST_CASE("in evaluation the model has the average, and the weights of training after it",
          "[hooks][average]") {
  for (const char* optimizer : {"FusedAdamW", "FusedAdamW bf16 remainder"}) {
    INFO(optimizer);
    AveragedRun averaged(ema(0.5), optimizer);
    SmallRun& run = averaged.run;
    run.session->evaluate([&] { CHECK(averaged.average->averages().empty()); });  // the weights themselves
    for (int step = 0; step < 3; ++step) run.step();
    const NamedTensors before = weights_of(run);
    NamedTensors rounded;
    for (const auto& [name, average] : averaged.average->averages()) {
      rounded[name] = average.to(before.at(name).scalar_type());
    }
    REQUIRE(first_difference(rounded, before) != "");
    run.session->evaluate([&] {
      CHECK(first_difference(weights_of(run), rounded) == "");
      run.session->evaluate([&] { CHECK(first_difference(weights_of(run), rounded) == ""); });
      CHECK(first_difference(weights_of(run), rounded) == "");
    });
    CHECK(first_difference(weights_of(run), before) == "");
    CHECK_THROWS_AS(run.session->evaluate([] { throw std::runtime_error("made up"); }), std::runtime_error);
    CHECK(first_difference(weights_of(run), before) == "");
    {
      const auto in_model = averaged.average->in_model();
      CHECK(first_difference(weights_of(run), rounded) == "");
    }
    CHECK(first_difference(weights_of(run), before) == "");
  }
}

TEST_CASE("an average may be left out of evaluation, and may be in host memory", "[hooks][average]") {
  AveragedRun averaged(ema(0.5).in_evaluation(false).device(at::kCPU));
  for (int step = 0; step < 3; ++step) averaged.run.step();
  const NamedTensors before = weights_of(averaged.run);
  averaged.run.session->evaluate([&] { CHECK(first_difference(weights_of(averaged.run), before) == ""); });
  const auto in_model = averaged.average->in_model();
  CHECK(first_difference(weights_of(averaged.run), averaged.average->averages()) == "");
}

TEST_CASE("what validation measures and SaveBest writes is the average", "[hooks][average][validation]") {
  const TemporaryFolder folder;
  AveragedRun averaged(ema(0.5));
  NamedTensors measured;
  averaged.run.session->use(SaveBest(folder.path("best"))).use(Validation(2, [&] {
    measured = weights_of(averaged.run);
    return 1.0 / static_cast<double>(averaged.run.session->progress().step);  // always better
  }));
  for (int step = 0; step < 4; ++step) averaged.run.step();
  CHECK(first_difference(measured, averaged.average->averages()) == "");
  const NamedTensors training = weights_of(averaged.run);
  CHECK(first_difference(measured, training) != "");
  averaged.run.session->finish();
  FileReader reader(posix_file_system(), folder.path("best/model.safetensors"));
  CHECK(first_difference(detail::read_tensors(reader, "best"), measured) == "");
  CHECK(first_difference(weights_of(averaged.run), training) == "");
}

TEST_CASE("a resumed run goes on with its average to the bit, with other ranks, too",
          "[hooks][average][resume]") {
  for (const char* optimizer : {"FusedAdamW", "OneBitAdam", "SGD"}) {
    INFO(optimizer);
    const auto runs_of = [&](int ranks, const std::string& folder, bool averages) {
      SmallRuns runs;
      for (const auto& world : Communicator::in_process(ranks)) {
        runs.push_back(std::make_unique<SmallRun>(registered_optimizer(optimizer),
                                                  std::vector<RegisteredHook>(),
                                                  /*dropout=*/0, world, /*own_random=*/false));
        runs.back()->shards = 2;
        if (averages) runs.back()->session->use(WeightAverage(tail_average(2)));
        runs.back()->session->use(Checkpoints(CheckpointsOptions(folder).every(1'000)));
      }
      return runs;
    };
    const auto train = [](SmallRuns& runs, int steps) {
      for (int step = 0; step < steps; ++step) {
        REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
      }
    };
    const auto averages_of = [](SmallRun& run) { return run.parts->find<WeightAverage>()->averages(); };
    const TemporaryFolder folder;
    SmallRuns whole = runs_of(2, folder.path(), true);
    train(whole, 4);
    REQUIRE(first_of(on_all_ranks(
                whole, [](SmallRun& run, int) { run.parts->find<Checkpoints>()->save_now(); })) == "");
    const NamedTensors then = [&] {
      NamedTensors copy;
      for (const auto& [name, average] : averages_of(*whole[1])) copy[name] = average.clone();
      return copy;
    }();
    train(whole, 3);
    const CapturedStderr quiet;
    for (const int ranks : {2, 1, 3}) {
      INFO(ranks << " ranks");
      SmallRuns resumed = runs_of(ranks, folder.path(), true);
      REQUIRE(first_of(on_all_ranks(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
      for (const auto& run : resumed) {
        CHECK(first_difference(averages_of(*run), then) == "");
        CHECK(run->parts->find<WeightAverage>()->updates() == 3);
      }
      if (ranks != 2) continue;
      train(resumed, 3);
      CHECK(first_difference(averages_of(*resumed[0]), averages_of(*whole[0])) == "");
    }
    SmallRuns without = runs_of(1, folder.path(), false);
    CHECK(contains(refusal([&] { without[0]->session->resume(); }),
                   "\"hook/weight_average/updates\", of which this Session knows nothing"));
  }
}

TEST_CASE("an average that does not fit the model is refused, and changes nothing",
          "[hooks][average][resume]") {
  const auto run_in = [](const std::string& folder) {
    auto run = std::make_unique<AveragedRun>(ema(0.5));
    run->run.session->use(Checkpoints(CheckpointsOptions(folder).synchronous(true)));
    return run;
  };
  const std::string file = "optimizer-rank-00000-of-00001.safetensors",
                    name = "head.bias/hook.weight_average";
  const struct {
    const char* message;
    std::function<void(NamedTensors&)> edit;
  } cases[] = {
      {"the average of head.bias is Double", [&](NamedTensors& t) { t[name] = t.at(name).to(at::kDouble); }},
      {"of shape [2]", [&](NamedTensors& t) { t[name] = at::zeros({2}); }},
      {"has no \"head.bias/hook.weight_average\"", [&](NamedTensors& t) { t.erase(name); }},
      {"but no average is with it",
       [&](NamedTensors& t) {
         for (auto item = t.begin(); item != t.end();) {
           item = contains(item->first, "/hook.") ? t.erase(item) : std::next(item);
         }
       }},
      {"averages of 11 parameters", [&](NamedTensors& t) { t["other" + name] = t.at(name); }},
  };
  for (const auto& each : cases) {
    const TemporaryFolder folder;
    auto saved = run_in(folder.path());
    saved->run.step();
    saved->run.session->finish();
    rewrite_file(list_checkpoints(folder.path()).front().folder, file, each.edit);
    auto resumed = run_in(folder.path());
    const auto before = resumed->run.state();
    const CapturedStderr quiet;
    const std::string message = refusal([&] { resumed->run.session->resume(); });
    INFO(message);
    CHECK(contains(message, each.message));
    CHECK(first_difference(resumed->run.state(), before) == "");
    CHECK(resumed->average->averages().empty());
  }
}

TEST_CASE("weights of a step after which a hook throws are not lost to the average", "[hooks][average]") {
  // Throws once, behind the step, before or behind the average's turn.
  struct Failing : Hook {
    Failing(Slot slot, int64_t step) : slot_(slot), step_(step) {}
    std::string hook_name() const override { return "failing"; }
    Slot slot() const override { return slot_; }
    void after_step(StepReport& report) override {
      if (report.progress().step == step_) throw std::runtime_error("made up");
    }
    Slot slot_;
    int64_t step_;
  };
  for (const WeightAverageOptions& options : {ema(0.5), tail_average(2), ema(0.5).every(2)}) {
    for (const Slot slot : {Slot::data, Slot::record}) {
      for (const int64_t step : {1, 2, 4}) {
        CAPTURE(static_cast<int>(slot), step);
        AveragedRun wanted(options), found(options);
        found.run.session->use(Failing(slot, step));
        for (int64_t s = 1; s <= 4; ++s) {
          wanted.run.step();
          if (s == step) {
            CHECK_THROWS_AS(found.run.step(), std::runtime_error);
          } else {
            found.run.step();
          }
        }
        CHECK(first_difference(found.average->parameter_state(), wanted.average->averages()) == "");
        CHECK(found.average->updates() == wanted.average->updates());
      }
    }
  }
}

TEST_CASE("parameters may join an average, be frozen, and be replaced", "[hooks][average]") {
  AveragedRun averaged(ema(0.5));
  SmallRun& run = averaged.run;
  Tensor& bias = run.model->head->bias;
  bias.requires_grad_(false);
  run.step();
  run.step();
  CHECK(averaged.average->averages().count("head.bias") == 0);
  bias.requires_grad_(true);
  run.step();
  CHECK(averaged.average->averages().at("head.bias").equal(bias));  // begins with its value
  run.step();
  const Tensor average = averaged.average->averages().at("head.bias").clone();
  bias.requires_grad_(false);
  run.step();
  const Tensor wanted = average * 0.5 + bias.detach() * 0.5;  // of a weight that no longer moves
  CHECK((averaged.average->averages().at("head.bias") - wanted).abs().max().item<double>() < 1e-7);

  // Another tensor under the same name, as when points of a scene are added.
  const auto cloud = std::make_shared<Cloud>();
  FusedAdamW optimizer(cloud->parameters(), FusedAdamWOptions(0.1));
  Session session(*cloud, optimizer);
  const auto of_cloud = std::make_shared<WeightAverage>(ema(0.5));
  session.use(of_cloud);
  const auto step = [&] {
    auto [x] = session.begin(torch::ones({1}));
    session.backward((cloud->points() * x).square().mean());
    session.step();
  };
  step();
  step();
  cloud->replace(torch::ones({5}).requires_grad_());
  optimizer.param_groups()[0].params()[0] = cloud->points();
  step();
  CHECK(of_cloud->averages().at("points").equal(cloud->points()));
}

TEST_CASE("mistakes with an average are told in a sentence", "[hooks][average][mistakes]") {
  const auto averaging = [](const WeightAverageOptions& options) { return [=] { WeightAverage{options}; }; };
  const std::vector<Mistake> mistakes = {
      {"a decay of 1", {"decay", "[0, 1)", "not 1"}, averaging(ema(1))},
      {"a decay that is not a number", {"decay", "[0, 1)"}, averaging(ema(std::nan("")))},
      {"a warm-up of a mean", {"warm_up", "leave warm_up out"}, averaging(tail_average(3).warm_up(true))},
      {"every 0 steps", {"every must be at least 1"}, averaging(ema(0.9).every(0))},
      {"a step below 0", {"from_step", "-1"}, averaging(tail_average(-1))},
      {"no average yet",
       {"in_model before the first update", "is 5"},
       [] {
         AveragedRun averaged(ema(0.9).from_step(5));
         averaged.run.step();
         static_cast<void>(averaged.average->in_model());
       }},
      {"training on it",
       {"Session::begin while the model has the average", "end the scope"},
       [] {
         AveragedRun averaged(ema(0.9));
         averaged.run.step();
         const auto in_model = averaged.average->in_model();
         averaged.run.step();
       }},
      {"saving it as the weights",
       {"a checkpoint would hold the average"},
       [] {
         const TemporaryFolder folder;
         AveragedRun averaged(ema(0.9));
         const auto checkpoints = std::make_shared<Checkpoints>(CheckpointsOptions(folder.path()));
         averaged.run.session->use(checkpoints);
         averaged.run.step();
         const auto in_model = averaged.average->in_model();
         checkpoints->save_now();
       }},
  };
  CHECK(faults_of(mistakes) == "");
}

TEST_CASE("ranks that share weights share their average, in evaluation and in checkpoints",
          "[hooks][average][shards]") {
  for (const Sharded what : {Sharded::gradients, Sharded::parameters}) {
    INFO(shards::name_of(what));
    const TemporaryFolder folder;
    const auto runs_with = [&](const shards::Adds& adds) {
      return shards::runs_of(registered_optimizer("FusedAdamW"), {}, 2, [&](SmallRun& run) {
        adds(run);
        run.session->use(WeightAverage(ema(0.5)));
      });
    };
    const auto sharded_runs = [&] {
      return runs_with([&](SmallRun& run) {
        shards::sharded(what)(run);
        run.session->use(Checkpoints(CheckpointsOptions(folder.path()).synchronous(true)))
            .use(SaveBest(folder.path("best-" + std::to_string(run.world->rank()))))
            .use(Validation(3, [&run] {
              const auto batch = small_batch(99);
              return run.model->loss(batch.first, batch.second).item<double>();
            }));
      });
    };
    auto plain = runs_with(shards::data_parallel), sharded = sharded_runs();
    for (int step = 0; step < 3; ++step) {
      REQUIRE(shards::step_all(plain) == "");
      REQUIRE(shards::step_all(sharded) == "");
    }
    const auto averages_of = [](SmallRun& run) { return run.parts->find<WeightAverage>()->averages(); };
    const NamedTensors wanted = averages_of(*plain[0]);
    // What evaluation sees, and what SaveBest wrote: gradients were added in another order.
    std::vector<NamedTensors> seen(2);
    REQUIRE(shards::on_all(sharded, [&](SmallRun& run) {
              const auto in_model = run.parts->find<WeightAverage>()->in_model();
              const auto whole = run.session->whole_parameters();
              seen[static_cast<size_t>(run.world->rank())] = weights_of(run);
            }) == "");
    CHECK(largest_error(seen[0], wanted) < 1e-6);
    CHECK(first_difference(seen[0], seen[1]) == "");
    FileReader reader(posix_file_system(), folder.path("best-0/model.safetensors"));
    CHECK(first_difference(detail::read_tensors(reader, "best"), seen[0]) == "");
    if (what == Sharded::parameters) {
      std::vector<int64_t> elements(2);
      int64_t all = 0;
      for (size_t rank = 0; rank < 2; ++rank) {
        for (const auto& [name, average] : averages_of(*sharded[rank])) elements[rank] += average.numel();
      }
      for (const auto& [name, average] : wanted) all += average.numel();
      CHECK(elements[0] + elements[1] == all);
      CHECK(elements[0] < all);
      CHECK(contains(shards::on_all(sharded,
                                    [](SmallRun& run) {
                                      const auto whole = run.session->whole_parameters();
                                      run.session->evaluate([] {});
                                    }),
                     "while what Session::whole_parameters() returned exists"));
    }
    REQUIRE(shards::on_all(sharded, [](SmallRun& run) { run.parts->find<Checkpoints>()->save_now(); }) == "");

    const CapturedStderr quiet;
    SmallRun alone(registered_optimizer("FusedAdamW"), {});
    alone.session->use(WeightAverage(ema(0.5)))
        .use(Checkpoints(CheckpointsOptions(folder.path())))
        .use(SaveBest(folder.path("best-alone")))
        .use(Validation(3, [] { return 1.0; }));
    alone.session->resume();
    CHECK(first_difference(averages_of(alone), seen[0]) == "");
    auto resumed = sharded_runs();
    REQUIRE(shards::on_all(resumed, [](SmallRun& run) { run.session->resume(); }) == "");
    for (int step = 0; step < 2; ++step) {
      REQUIRE(shards::step_all(sharded) == "");
      REQUIRE(shards::step_all(resumed) == "");
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK(first_difference(averages_of(*resumed[rank]), averages_of(*sharded[rank])) == "");
    }
    sharded.clear();  // unlock the folders before they go
    resumed.clear();
  }
}

TEST_CASE("running statistics are measured anew for the weights that the model has", "[hooks][average]") {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
  auto* norm = model[1]->as<torch::nn::BatchNorm1d>();
  norm->options.momentum(0.3);
  const std::vector<Tensor> batches = {torch::randn({8, 3}), torch::randn({8, 3}) + 2,
                                       torch::randn({8, 3}) * 3};
  model->forward(batches[0]);
  norm->eval();
  Tensor mean = torch::zeros({4}), variance = torch::zeros({4});
  for (const Tensor& batch : batches) {
    const Tensor hidden = model[0]->as<torch::nn::Linear>()->forward(batch).detach();
    mean += hidden.mean(0) / 3;
    variance += hidden.var(0, /*unbiased=*/true) / 3;
  }
  update_batch_norm(*model, [&] {
    CHECK_FALSE(torch::GradMode::is_enabled());
    CHECK(norm->is_training());
    for (const Tensor& batch : batches) model->forward(batch);
  });
  CHECK(torch::allclose(norm->running_mean, mean, 1e-5, 1e-6));
  CHECK(torch::allclose(norm->running_var, variance, 1e-5, 1e-6));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 3);
  CHECK(norm->options.momentum() == 0.3);
  CHECK(model->is_training());
  CHECK_FALSE(norm->is_training());

  const Tensor before = norm->running_mean.clone();
  CHECK(
      contains(refusal([&] { update_batch_norm(*model, [] {}); }), "no batch went through the batch norm 1"));
  CHECK_THROWS_AS(update_batch_norm(*model,
                                    [&] {
                                      model->forward(batches[0]);
                                      throw std::runtime_error("made up");
                                    }),
                  std::runtime_error);
  CHECK(norm->running_mean.equal(before));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 3);
  CHECK(contains(refusal([&] { update_batch_norm(*model, nullptr); }), "needs a function"));
  torch::nn::Linear plain(2, 2);
  update_batch_norm(*plain, [] { throw std::runtime_error("not called"); });
}

}  // namespace pacer::testing
