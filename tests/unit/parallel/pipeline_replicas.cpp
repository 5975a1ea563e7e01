// What replicas of a pipeline's stages must have alike, from the start on and at every step: memory order of
// parameters, values of buffers, what forward writes to, and numbers of the optimizer's groups.
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::pipelines {
namespace {

constexpr int kStages = 2, kReplicas = 2, kRanks = kStages * kReplicas;

// Two pipelines of two stages whose ranks began with other models. Rank r is replica r % 2 of stage r / 2.
struct Replicas {
  explicit Replicas(const std::function<void(int rank, LanguageModel&)>& prepare, Setup own = {})
      : setup(own) {
    for (int rank = 0; rank < kRanks; ++rank) {
      setup.prepare = [&](LanguageModel& model) { prepare(rank, model); };
      models.push_back(make_model(setup));
    }
    setup.prepare = [](LanguageModel&) {};
  }
  // f on each rank; what each of them threw.
  std::vector<std::string> run(const std::function<void(PipelineRank&, int rank)>& f) {
    const auto worlds =
        Communicator::in_process(kRanks, CommunicatorOptions().timeout(std::chrono::seconds(10)));
    return run_ranks(kRanks, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      PipelineRank own(setup, one_f_one_b(4), kStages, worlds[at], models[at]);
      f(own, rank);
    });
  }

  Setup setup;
  std::vector<LanguageModel> models;
};

// A block of the stage of this rank.
BlockImpl& block_of(LanguageModel& model, int rank) {
  return model->blocks->at<BlockImpl>(rank / kReplicas == 0 ? 1 : 4);
}

void turn_around(Tensor& weight) {
  const torch::NoGradGuard no_grad;
  weight.set_data(weight.t().contiguous().t());
}

// Those that a step trains: forward passes write to running means.
std::map<std::string, Tensor> parameters_of(const PipelineRank& own) {
  std::map<std::string, Tensor> all = own.weights();
  for (auto item = all.begin(); item != all.end();) {
    item = contains(item->first, "running_mean") ? all.erase(item) : std::next(item);
  }
  return all;
}

void require_equal_replicas(PipelineRank& own) {
  for (const auto& [name, weight] : own.weights()) {
    std::string bytes(static_cast<const char*>(weight.const_data_ptr()), weight.nbytes());
    const auto all = own.grid.replicas()->exchange(bytes);
    require<Error>(all[0] == all[1], name, " differs between the replicas");
  }
}

}  // namespace

TEST_CASE("a parameter whose memory order is another one on one replica of a pipeline is refused",
          "[pipeline][replicas]") {
  for (int other = 0; other < kRanks; ++other) {
    CAPTURE(other);
    Replicas replicas([&](int rank, LanguageModel& model) {
      if (rank == other) turn_around(block_of(model, rank).up->weight);
    });
    const std::string name = other / kReplicas == 0 ? "blocks.1.up.weight" : "blocks.4.up.weight";
    for (const std::string& message : replicas.run([](PipelineRank&own, int) { own.step(0); })) {
      CHECK(contains(message, name));
      CHECK(contains(message, "[32, 16]\""));
      CHECK(contains(message, "[32, 16], strides [1, 32]\""));
    }
  }
}

TEST_CASE(
    "a memory order that changes between two steps on one replica of a pipeline is refused, on both of a "
    "stage",
    "[pipeline][replicas]") {
  for (int other = 0; other < kRanks; ++other) {
    CAPTURE(other);
    Replicas replicas([](int, LanguageModel&) {});
    std::vector<int> unchanged(kRanks);
    const auto messages = replicas.run([&](PipelineRank& own, int rank) {
      own.step(0);
      if (rank == other) turn_around(block_of(own.model, rank).up->weight);
      const auto before = parameters_of(own);
      try {
        own.step(1);
      } catch (...) {
        unchanged[static_cast<size_t>(rank)] = difference(before, parameters_of(own)) == "";
        throw;
      }
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string& message = messages[static_cast<size_t>(rank)];
      INFO(message);
      CHECK(message != "");
      CHECK(unchanged[static_cast<size_t>(rank)]);
      if (rank / kReplicas == other / kReplicas) CHECK(contains(message, "[32, 16], strides [1, 32]\""));
    }
  }
}

TEST_CASE("buffers of a pipeline that replicas drew at random begin as those of replica 0",
          "[pipeline][replicas]") {
  for (const bool sync : {true, false}) {
    CAPTURE(sync);
    Setup setup;
    setup.options.sync_buffers(sync);
    Replicas replicas(
        [](int rank, LanguageModel& model) {
          torch::manual_seed(rank);
          for (size_t i = 0; i < model->blocks->size(); ++i) {
            model->blocks->at<BlockImpl>(i).register_buffer("table", torch::rand({4}));
          }
        },
        setup);
    std::vector<Tensor> drawn;
    for (int rank = 0; rank < kRanks; ++rank) {
      drawn.push_back(
          block_of(replicas.models[static_cast<size_t>(rank)], rank).named_buffers()["table"].clone());
    }
    REQUIRE(first_of(replicas.run([](PipelineRank& own, int) {
              own.step(0);
              own.step(1);
              own.session->finish();
            })) == "");
    for (int rank = 0; rank < kRanks; ++rank) {
      const int first = rank / kReplicas * kReplicas;
      REQUIRE((rank == first || !drawn[static_cast<size_t>(rank)].equal(drawn[static_cast<size_t>(first)])));
      CHECK(block_of(replicas.models[static_cast<size_t>(rank)], rank)
                .named_buffers()["table"]
                .equal(drawn[static_cast<size_t>(first)]));
    }
  }
}

TEST_CASE("replicas of a pipeline stay the same where forward writes to a parameter",
          "[pipeline][replicas]") {
  for (const int64_t first_written : {0, 2}) {
    for (const int writes : {0, 1}) {
      CAPTURE(first_written, writes);
      Replicas replicas([](int, LanguageModel& model) {
        const torch::NoGradGuard no_grad;
        model->embedding->weight.mul_(3);
      });
      REQUIRE(first_of(replicas.run([&](PipelineRank& own, int) {
                const int replica = own.grid.replicas()->rank();
                for (int64_t step = 0; step < 5; ++step) {
                  // Rows that are longer than 1 are shortened when they are looked up: others on each replica.
                  if (step >= first_written && replica >= writes) own.model->embedding->options.max_norm(1.0);
                  auto [x, y] = own.batch(step);
                  (void)own.pass(x.remainder(5) + 5 * replica, y);
                  own.session->step();
                  require_equal_replicas(own);
                }
                own.session->finish();
              })) == "");
      if (writes == 1) continue;  // what replica 0 has is what counts
      const Tensor row = replicas.models[0]->embedding->weight[0].detach();
      CHECK(row.norm().item<double>() < 1.1);
    }
  }
}

TEST_CASE(
    "a number of a parameter group that one rank of a pipeline changes is an error of that step on all ranks",
    "[pipeline][replicas]") {
  for (int changing = 0; changing < kRanks; ++changing) {
    CAPTURE(changing);
    Replicas replicas([](int, LanguageModel&) {});
    std::vector<int> unchanged(kRanks);
    const auto messages = replicas.run([&](PipelineRank& own, int rank) {
      own.step(0);
      if (rank == changing) {
        static_cast<FusedAdamWOptions&>(own.optimizer->param_groups()[0].options()).weight_decay(0.5);
      }
      const auto before = parameters_of(own);
      try {
        own.step(1);
      } catch (...) {
        unchanged[static_cast<size_t>(rank)] = difference(before, parameters_of(own)) == "";
        throw;
      }
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      CHECK(contains(messages[static_cast<size_t>(rank)], "optimizer option group/0/weight_decay: "));
      CHECK(unchanged[static_cast<size_t>(rank)]);
    }
  }
}

}  // namespace pacer::testing::pipelines
