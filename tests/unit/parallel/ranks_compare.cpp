// What ranks that train one model must have alike, from the start on and at every step: numbers of the
// optimizer's groups and memory order of parameters. tests/unit/parallel/ranks_compare_buffers.cpp has the rest.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using OwnWorld = std::shared_ptr<Communicator>;

CommunicatorOptions impatient() { return CommunicatorOptions().timeout(std::chrono::seconds(10)); }

struct Change {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<Tensor>, OwnWorld)> make;
  std::function<void(OptimizerOptions&)> change;
};

template <class Made, class Options>
Change change_of(const std::string& name, Options options, void (*change)(Options&)) {
  return {name,
          [options](std::vector<Tensor> parameters, const OwnWorld& world) -> std::unique_ptr<Optimizer> {
            (void)world;
            if constexpr (std::is_constructible_v<Made, std::vector<Tensor>, Options, OwnWorld>) {
              return std::make_unique<Made>(std::move(parameters), options, world);
            } else {
              return std::make_unique<Made>(std::move(parameters), options);
            }
          },
          [change](OptimizerOptions& base) { change(static_cast<Options&>(base)); }};
}

std::vector<Change> changes() {
  using namespace torch::optim;
  using Fused = FusedAdamWOptions;
  return {
      change_of<FusedAdamW, Fused>("weight_decay", Fused(0.01), [](Fused& o) { o.weight_decay(0.5); }),
      change_of<FusedAdamW, Fused>("beta1", Fused(0.01),
                                   [](Fused& o) {
                                     o.betas({0.5, 0.999});
                                   }),
      change_of<FusedAdamW, Fused>("beta2", Fused(0.01),
                                   [](Fused& o) {
                                     o.betas({0.9, 0.99});
                                   }),
      change_of<FusedAdamW, Fused>("eps", Fused(0.01), [](Fused& o) { o.eps(1e-3); }),
      change_of<FusedAdamW, Fused>("bias_correction", Fused(0.01),
                                   [](Fused& o) { o.bias_correction(false); }),
      change_of<FusedAdam, FusedAdamOptions>("weight_decay", FusedAdamOptions(0.01),
                                             [](FusedAdamOptions& o) { o.weight_decay(0.5); }),
      change_of<FusedLamb, FusedLambOptions>("max_coeff", FusedLambOptions(0.01),
                                             [](FusedLambOptions& o) { o.max_coeff(0.5); }),
      change_of<FusedSgd, FusedSgdOptions>("momentum", FusedSgdOptions(0.01).momentum(0.5),
                                           [](FusedSgdOptions& o) { o.momentum(0.6); }),
      change_of<FusedSgd, FusedSgdOptions>("maximize", FusedSgdOptions(0.01),
                                           [](FusedSgdOptions& o) { o.maximize(true); }),
      change_of<FusedRmsprop, FusedRmspropOptions>("centered", FusedRmspropOptions(0.01),
                                                   [](FusedRmspropOptions& o) { o.centered(true); }),
      change_of<OneBitAdam, OneBitAdamOptions>("eps", OneBitAdamOptions(0.01).freeze_step(100),
                                               [](OneBitAdamOptions& o) { o.eps(1e-3); }),
      change_of<OneBitLamb, OneBitLambOptions>("max_coeff", OneBitLambOptions(0.01).freeze_step(100),
                                               [](OneBitLambOptions& o) { o.max_coeff(0.5); }),
      change_of<Muon, MuonOptions>("momentum", MuonOptions(0.01).orthogonalize(false),
                                   [](MuonOptions& o) { o.momentum(0.5); }),
      change_of<ScheduleFreeAdamW, ScheduleFreeAdamWOptions>(
          "eps", ScheduleFreeAdamWOptions(0.01), [](ScheduleFreeAdamWOptions& o) { o.eps(1e-3); }),
      change_of<Adam, AdamOptions>("weight_decay", AdamOptions(0.01),
                                   [](AdamOptions& o) { o.weight_decay(0.5); }),
      change_of<AdamW, AdamWOptions>("weight_decay", AdamWOptions(0.01),
                                     [](AdamWOptions& o) { o.weight_decay(0.5); }),
      change_of<AdamW, AdamWOptions>("beta1", AdamWOptions(0.01),
                                     [](AdamWOptions& o) {
                                       o.betas({0.5, 0.999});
                                     }),
      change_of<AdamW, AdamWOptions>("eps", AdamWOptions(0.01), [](AdamWOptions& o) { o.eps(1e-3); }),
      change_of<SGD, SGDOptions>("momentum", SGDOptions(0.01).momentum(0.9),
                                 [](SGDOptions& o) { o.momentum(0.5); }),
      change_of<SGD, SGDOptions>("weight_decay", SGDOptions(0.01),
                                 [](SGDOptions& o) { o.weight_decay(0.5); }),
      change_of<RMSprop, RMSpropOptions>("alpha", RMSpropOptions(0.01),
                                         [](RMSpropOptions& o) { o.alpha(0.5); }),
      change_of<Adagrad, AdagradOptions>("eps", AdagradOptions(0.01), [](AdagradOptions& o) { o.eps(1e-3); }),
  };
}

void train_step(Session& session, torch::nn::Sequential& model, const Tensor& x) {
  auto [input] = session.begin(x);
  session.backward(model->forward(input).square().mean());
  session.step();
}

TEST_CASE("a number of a parameter group that one rank changes is an error of that step on all ranks") {
  for (const Change& change : changes()) {
    INFO(change.name);
    const auto worlds = Communicator::in_process(2, impatient());
    std::vector<Tensor> before(2), after(2);
    const auto messages = run_ranks(2, [&](int rank) {
      torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      const auto optimizer = change.make(model->parameters(), worlds[rank]);
      Session session(*model, *optimizer, worlds[rank]);
      train_step(session, model, torch::ones({2, 4}));
      if (rank == 1) change.change(optimizer->param_groups()[0].options());
      before[rank] = model->parameters()[0].detach().clone();
      try {
        train_step(session, model, torch::ones({2, 4}));
      } catch (const std::exception&) {
        after[rank] = model->parameters()[0].detach().clone();
        throw;
      }
    });
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(contains(messages[rank], "optimizer option group/0/" + change.name + ": "));
      CHECK((after[rank].defined() && after[rank].equal(before[rank])));
    }
  }
}

void to_channels_last(torch::nn::Sequential& model) {
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : model->parameters()) {
    if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
  }
}

torch::nn::Sequential convolutions() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Conv2d(3, 4, 3), torch::nn::Conv2d(4, 2, 3));
}

// A training of two ranks, each with data of its own.
using RankRun = std::function<void(torch::nn::Sequential& model, const OwnWorld& world, const Tensor& x)>;

RankRun in_session(std::function<void(Session&)> use) {
  return [use = std::move(use)](torch::nn::Sequential& model, const OwnWorld& world, const Tensor& x) {
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, world);
    use(session);
    for (int i = 0; i < 3; ++i) train_step(session, model, x + i);
  };
}

RankRun onebit(bool with_session) {
  return [=](torch::nn::Sequential& model, const OwnWorld& world, const Tensor& x) {
    OneBitAdam optimizer(model->parameters(), OneBitAdamOptions(0.01).freeze_step(2), world);
    const auto session = with_session ? std::make_unique<Session>(*model, optimizer, world) : nullptr;
    for (int i = 0; i < 4; ++i) {
      if (session) {
        train_step(*session, model, x + i);
      } else {
        optimizer.zero_grad();
        model->forward(x + i).square().mean().backward();
        optimizer.step();
      }
    }
  };
}

std::vector<std::pair<std::string, RankRun>> all_runs() {
  return {
      {"flat", in_session([](Session& s) { s.use(DataParallel(DataParallelOptions().in_place(false))); })},
      {"in place", in_session([](Session& s) { s.use(DataParallel(DataParallelOptions().in_place(true))); })},
      {"check", in_session([](Session& s) {
         s.use(DataParallel(DataParallelOptions().initial_parameters(InitialParameters::check)));
       })},
      {"shards", in_session([](Session& s) { s.use(Shards()); })},
      {"1-bit", onebit(/*with_session=*/true)},
      {"1-bit alone", onebit(/*with_session=*/false)},
  };
}

TEST_CASE("a parameter whose memory order is another one on one rank is refused") {
  for (const auto& [name, run] : all_runs()) {
    INFO(name);
    const auto worlds = Communicator::in_process(2, impatient());
    std::vector<torch::nn::Sequential> models = {convolutions(), convolutions()};
    to_channels_last(models[1]);
    const auto messages = run_ranks(2, [&, run = run](int rank) {
      run(models[rank], worlds[rank], torch::ones({2, 3, 6, 6}) * (rank + 1));
    });
    for (const std::string& message : messages) {
      INFO(message);
      CHECK(contains(message, "strides [27, 1, 9, 3]"));
      if (name == "shards") continue;  // which refuse any other than the usual one, on any rank
      CHECK(contains(message, "[4, 3, 3, 3]\""));
      CHECK(contains(message, "[4, 3, 3, 3], strides [27, 1, 9, 3]\""));
    }
  }
}

TEST_CASE("a memory order that all ranks share gives the numbers of the usual one") {
  for (const auto& [name, run] : all_runs()) {
    INFO(name);
    if (name == "shards") continue;  // which refuse it
    std::vector<std::vector<Tensor>> first;
    for (const bool is_other : {false, true}) {
      const auto worlds = Communicator::in_process(2, impatient());
      std::vector<torch::nn::Sequential> models = {convolutions(), convolutions()};
      for (auto& model : models) {
        if (is_other) to_channels_last(model);
      }
      REQUIRE(first_of(run_ranks(2, [&, run = run](int rank) {
                run(models[rank], worlds[rank], torch::ones({2, 3, 6, 6}) * (rank + 1));
              })) == "");
      for (size_t i = 0; i < models[0]->parameters().size(); ++i) {
        CHECK(models[0]->parameters()[i].equal(models[1]->parameters()[i]));
      }
      first.push_back(models[0]->parameters());
    }
    if (contains(name, "1-bit")) continue;  // signs share scales along memory
    for (size_t i = 0; i < first[0].size(); ++i) CHECK(first[0][i].allclose(first[1][i], 1e-4, 1e-6));
  }
}

// Both ranks take two steps, those of `changing` put their parameters into another order, and both go on.
struct ChangedOrder {
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<Tensor>, OwnWorld)>;
  ChangedOrder(const Make& make, const std::function<void(Session&)>& use, const std::vector<int>& changing) {
    const auto worlds = Communicator::in_process(2, impatient());
    messages = run_ranks(2, [&](int rank) {
      torch::nn::Sequential& model = models[rank];
      const auto optimizer = make(model->parameters(), worlds[rank]);
      Session session(*model, *optimizer, worlds[rank]);
      use(session);
      for (int i = 0; i < 5; ++i) {
        if (i == 2) {
          if (std::count(changing.begin(), changing.end(), rank) > 0) to_channels_last(model);
          for (const Tensor& parameter : model->parameters())
            before[rank].push_back(parameter.detach().clone());
        }
        train_step(session, model, torch::ones({2, 3, 6, 6}) * (rank + 1 + i));
      }
      session.finish();
    });
  }
  std::vector<torch::nn::Sequential> models = {convolutions(), convolutions()};
  std::vector<std::vector<Tensor>> before = std::vector<std::vector<Tensor>>(2);
  std::vector<std::string> messages;
};

TEST_CASE("a memory order that changes between two steps is refused on one rank, and followed on all") {
  const ChangedOrder::Make fused = [](auto parameters, const auto&) {
    return std::make_unique<FusedAdamW>(parameters, FusedAdamWOptions(0.01));
  };
  const ChangedOrder::Make torchs = [](auto parameters, const auto&) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
  };
  const ChangedOrder::Make bits = [](auto parameters, const auto& world) {
    return std::make_unique<OneBitAdam>(parameters, OneBitAdamOptions(0.01).freeze_step(2), world);
  };
  const auto flat = [](Session& s) { s.use(DataParallel(DataParallelOptions().in_place(false))); };
  const auto in_place = [](Session& s) { s.use(DataParallel(DataParallelOptions().in_place(true))); };
  const auto windows = [&](Session& s) {
    in_place(s);
    s.use(GradientAccumulation(1)).use(GradientClipping(1.0));
  };
  const std::vector<std::pair<ChangedOrder::Make, std::function<void(Session&)>>> all = {
      {fused, flat}, {fused, in_place}, {fused, windows}, {torchs, flat}, {torchs, in_place}, {bits, flat}};
  for (size_t n = 0; n < all.size(); ++n) {
    CAPTURE(n);
    const auto& [make, use] = all[n];
    for (const int changing : {0, 1}) {
      const ChangedOrder one(make, use, {changing});
      for (size_t rank = 0; rank < 2; ++rank) {
        INFO(one.messages[rank]);
        CHECK(contains(one.messages[rank], "0.weight"));
        CHECK(contains(one.messages[rank], "[4, 3, 3, 3]\""));
        CHECK(contains(one.messages[rank], "[4, 3, 3, 3], strides [27, 1, 9, 3]\""));
        const auto after = one.models[rank]->parameters();
        for (size_t i = 0; i < after.size(); ++i) CHECK(after[i].equal(one.before[rank][i]));
      }
    }
    if (n + 1 == all.size()) continue;  // 1-bit optimizers keep the order that they froze with
    const ChangedOrder none(make, use, {}), both(make, use, {0, 1});
    REQUIRE(first_of(none.messages) == "");
    REQUIRE(first_of(both.messages) == "");
    for (size_t i = 0; i < none.models[0]->parameters().size(); ++i) {
      const Tensor here = both.models[0]->parameters()[i];
      CHECK(here.equal(both.models[1]->parameters()[i]));
      CHECK(here.allclose(none.models[0]->parameters()[i], 1e-4, 1e-6));
    }
  }
}

}  // namespace
}  // namespace pacer::testing
