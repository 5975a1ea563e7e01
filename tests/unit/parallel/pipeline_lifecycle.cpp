// What users do around a pipeline: checkpoints for any number of stages, mistakes, reading the model, batches
// of several tensors; and what is sent and kept.
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include <torch/csrc/autograd/custom_function.h>

#include <pacer/optimizers/schedule_free.h>

#include "support/parallel/pipeline_runs.h"
#include "support/temporary_folder.h"

namespace pacer::testing::pipelines {
namespace {

using Catch::Matchers::ContainsSubstring;

// f on each rank of pipelines that were set up alike, or by `change` otherwise. What each rank threw.
std::vector<std::string> on_ranks(
    int stages, int replicas, const Setup& setup, const PipelineSchedule& schedule,
    const std::function<void(PipelineRank&)>& f,
    const std::function<void(int rank, Setup&, PipelineSchedule&)>& change = {}) {
  const int count = stages * replicas;
  const auto worlds =
      Communicator::in_process(count, CommunicatorOptions().timeout(std::chrono::seconds(20)));
  std::vector<Setup> setups(static_cast<size_t>(count), setup);
  std::vector<PipelineSchedule> schedules(static_cast<size_t>(count), schedule);
  std::vector<LanguageModel> models;
  for (int rank = 0; rank < count; ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (change) change(rank, setups[at], schedules[at]);
    models.push_back(make_model(setups[at]));
  }
  return run_ranks(count, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    PipelineRank own(setups[at], schedules[at], stages, worlds[at], models[at]);
    f(own);
  });
}

Setup with_checkpoints(const std::string& folder) {
  Setup setup;
  setup.use = [folder](Session& session, LanguageModel&) {
    session.use(Checkpoints(CheckpointsOptions(folder).every(2)));
  };
  return setup;
}

// The averages of weights that Sessions on several threads make.
class Averages {
 public:
  void use(Session& session) {
    const auto average = std::make_shared<WeightAverage>(ema(0.5));
    session.use(average);
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(average);
  }
  void add_to(std::map<std::string, Tensor>& weights) const {
    for (const auto& average : all_) {
      for (const auto& [name, tensor] : average->averages()) weights["average of " + name] = tensor.clone();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<WeightAverage>> all_;
};

// Steps `from` ... `to` - 1 by a pipeline, or (0 stages) by the whole model, after a resume. The weights
// then, and their averages.
std::map<std::string, Tensor> go_on(const std::string& folder, int stages, const PipelineSchedule& schedule,
                                    int64_t from, int64_t to) {
  Setup setup = with_checkpoints(folder);
  const auto averages = std::make_shared<Averages>();
  setup.use = [averages, use = setup.use](Session& session, LanguageModel& model) {
    use(session, model);
    averages->use(session);
  };
  std::map<std::string, Tensor> weights;
  if (stages > 0) {
    std::mutex mutex;
    const auto messages = on_ranks(stages, 1, setup, schedule, [&](PipelineRank& rank) {
      require(rank.session->resume().value_or(0) == from, "resumed elsewhere");
      for (int64_t step = from; step < to; ++step) rank.step(step);
      rank.session->finish();
      const std::lock_guard<std::mutex> lock(mutex);
      for (const auto& [name, tensor] : rank.weights()) weights[name] = tensor;
    });
    REQUIRE(first_of(messages) == "");
    averages->add_to(weights);
    return weights;
  }
  LanguageModel model = make_model(setup);
  const auto optimizer = setup.optimizer(model->named_parameters());
  Session session(*model, *optimizer);
  session.use(GradientAccumulation(setup.micro_batches));
  setup.use(session, model);
  REQUIRE(session.resume().value_or(0) == from);
  for (int64_t step = from; step < to; ++step) {
    const auto [x, y] = batch_of(setup.rows * setup.micro_batches, step);
    for (int64_t k = 0; k < setup.micro_batches; ++k) {
      auto [tokens, targets] =
          session.begin(x.narrow(0, k * setup.rows, setup.rows), y.narrow(0, k * setup.rows, setup.rows));
      session.backward(model->forward(tokens, targets));
      session.step();
    }
  }
  session.finish();
  for (const auto& [name, tensor] : detail::model_tensors(*model)) weights[name] = tensor.detach().clone();
  averages->add_to(weights);
  return weights;
}

}  // namespace

TEST_CASE("a checkpoint of a pipeline goes on with any number of stages, to the bit", "[pipeline]") {
  struct Run {
    int stages;
    PipelineSchedule schedule;
  };
  const std::vector<Run> runs = {{0, {}}, {1, one_f_one_b(4)}, {2, interleaved(4, 2)}, {3, zero_bubble(4)}};
  const auto wanted = [] {
    const TemporaryFolder folder;
    return go_on(folder.path("run"), 0, {}, 0, 5);
  }();
  for (const Run& first : runs) {
    for (const Run& second : runs) {
      INFO(first.stages << " stages, then " << second.stages);
      const TemporaryFolder folder;
      go_on(folder.path("run"), first.stages, first.schedule, 0, 2);
      REQUIRE(difference(wanted, go_on(folder.path("run"), second.stages, second.schedule, 2, 5)) == "");
    }
  }
}

TEST_CASE("a pipeline says what is wrong with how it is set up, and changes nothing",
          "[pipeline][mistakes]") {
  struct Row {
    const char* name;
    const char* says;
    std::function<void(Setup&, PipelineSchedule&)> change;
  };
  const auto use = [](auto make) {
    return [make](Setup& setup, PipelineSchedule&) {
      setup.use = [make](Session& session, LanguageModel&) { session.use(make()); };
    };
  };
  const std::vector<Row> table = {
      {"nothing is named", "\"embedding.weight\" is in no block",
       [](Setup& s, auto&) { s.options = PipelineOptions(); }},
      {"head is not named", "\"head.weight\" is in no block",
       [](Setup& s, auto&) { s.options.last({"norm"}); }},
      {"no such module", "names \"headd\", but the model has no module",
       [](Setup& s, auto&) {
         s.options.last({"norm", "headd"});
       }},
      {"an empty name", "names \"\", but the model has no module",
       [](Setup& s, auto&) {
         s.options.last({"norm", "head", ""});
       }},
      {"a cut of too few numbers", "PipelineOptions::cut must have 3 numbers",
       [](Setup& s, auto&) {
         s.options.cut({0, 6});
       }},
      {"a cut that goes back", "ascending from 0 to the 6 blocks",
       [](Setup& s, auto&) {
         s.options.cut({0, 7, 6});
       }},
      {"more stages than blocks", "fewer than the 2 stages", [](Setup& s, auto&) { s.depth = 1; }},
      {"no blocks", "Blocks without a block", [](Setup& s, auto&) { s.depth = 0; }},
      {"no micro-batches", "micro", [](Setup&, PipelineSchedule& schedule) { schedule = one_f_one_b(0); }},
      {"interleaved with a rest", "multiple",
       [](Setup&, PipelineSchedule& schedule) { schedule = interleaved(3, 2); }},
      {"accumulation", "leave that hook out", use([] { return GradientAccumulation(4); })},
      {"SaveBest", "leave it out, and take the weights of the best step from a checkpoint",
       [](Setup& s, auto&) {
         s.use = [](Session& session, LanguageModel&) {
           session.use(Validation(ValidationOptions(1), [] { return 1.0; })).use(SaveBest("/tmp"));
         };
       }},
      {"DataParallel", "both do the work of the slot \"reduce\"", use([] { return DataParallel(); })},
      {"Shards", "both do the work of the slot \"reduce\"", use([] { return Shards(); })},
      {"CudaGraph", "CudaGraph", use([] { return CudaGraph(); })},
      {"clipping of a group", "whose stages have parameter groups of their own; leave out group",
       use([] { return GradientClipping(GradientClippingOptions(1.0).group(0)); })},
      {"clipping by another norm", "whose stages have parameter groups of their own; leave out group",
       use([] { return GradientClipping(GradientClippingOptions(1.0).norm_type(1)); })},
      {"frozen weights left out", "save_frozen(false)",
       use([] { return Checkpoints(CheckpointsOptions("nowhere").save_frozen(false)); })},
      {"an odd batch", "need a first dimension that is a multiple of 4",
       [](Setup& s, auto&) { s.micro_batches = 3; }},
      {"prewarm", "leave prewarm out",
       [](Setup& s, auto&) {
         s.use = [](Session& session, LanguageModel&) { session.prewarm([] { return Tensor(); }); };
       }},
      {"whole_parameters", "each rank has its stage only",
       [](Setup& s, auto&) {
         s.use = [](Session& session, LanguageModel&) { (void)session.whole_parameters(); };
       }},
      {"begin", "call pipeline.step",
       [](Setup& s, auto&) {
         s.use = [](Session& session, LanguageModel&) { (void)session.begin(torch::ones({2, 2})); };
       }},
      {"evaluation by the whole model", "has no values here",
       [](Setup& s, auto&) {
         s.use = [](Session& session, LanguageModel& model) {
           const auto [x, y] = batch_of(2, 0);
           (void)session.evaluate([&, data = x, target = y] { return model->forward(data, target); });
         };
       }},
      {"an optimizer of the whole model", "make the optimizer from pipeline.named_parameters()",
       [](Setup& s, auto&) {
         s.optimizer = [](const NamedParameters&) {
           static thread_local LanguageModel other(2);
           return std::make_unique<FusedAdamW>(other->named_parameters(), FusedAdamWOptions(0.01));
         };
       }},
      {"an optimizer that averages the weights", "cannot train with an optimizer that averages the weights",
       [](Setup& s, auto&) {
         s.optimizer = [](const NamedParameters& parameters) {
           return std::make_unique<ScheduleFreeAdamW>(parameters);
         };
       }},
      {"gradients switched off", "use Pipeline::evaluate for a loss alone",
       [](Setup& s, auto&) { s.steps = -2; }},
      {"other rows in one tensor", "have as many rows each, not 7 and 6",
       [](Setup& s, auto&) {
         s.options.weight_by_tokens(true);
         s.steps = -3;
       }},
      {"a loss of several numbers", "needs a loss that is one floating-point number",
       [](Setup& s, auto&) { s.steps = -1; }},
  };
  for (const Row& row : table) {
    INFO(row.name);
    Setup setup;
    PipelineSchedule schedule = one_f_one_b(4);
    row.change(setup, schedule);
    const auto messages = on_ranks(2, 1, setup, schedule, [&](PipelineRank& rank) {
      const auto no_grad = setup.steps == -2 ? std::make_unique<torch::NoGradGuard>() : nullptr;
      if (setup.steps == -1) {
        const auto [x, y] = rank.batch(0);
        (void)rank.pipeline.step(
            *rank.session, x, y, [&](Tensor tokens) { return rank.model->embed(tokens); },
            [](Tensor h, Tensor) { return h; });
      }
      if (setup.steps == -3) {
        const auto [x, y] = rank.batch(0);
        (void)rank.pass(x.narrow(0, 0, 7), y.narrow(0, 0, 6));
      }
      rank.step(0);
    });
    bool said = false;
    for (const std::string& message : messages) {
      REQUIRE(message != "");
      said = said || message.find(row.says) != std::string::npos;
    }
    INFO(messages[0] << "\n" << messages[1]);
    REQUIRE(said);
  }
}

TEST_CASE("ranks of a pipeline that are not alike hear of it before anything is sent",
          "[pipeline][mistakes]") {
  struct Row {
    const char* name;
    const char* says;
    std::function<void(Setup&, PipelineSchedule&)> change;  // of rank 1
  };
  const std::vector<Row> table = {
      {"more micro-batches", "micro-steps: 8",
       [](Setup& s, PipelineSchedule& schedule) {
         schedule = one_f_one_b(8);
         s.rows = 1;
         s.micro_batches = 8;
       }},
      {"another schedule", "gpipe", [](Setup&, PipelineSchedule& schedule) { schedule = gpipe(4); }},
      {"another cut", "cut at [0, 2, 6]",
       [](Setup& s, auto&) {
         s.options.cut({0, 2, 6});
       }},
      {"a tied model", "tensor of the model: head.weight",
       [](Setup& s, auto&) {
         s.is_tied = true;
         s.options.last({"norm", "embedding"});
       }},
      {"other options", "beta",
       [](Setup& s, auto&) {
         s.optimizer = [](NamedParameters parameters) {
           return std::make_unique<FusedAdamW>(std::move(parameters),
                                               FusedAdamWOptions(0.01).betas({0.5, 0.9}));
         };
       }},
      {"another batch", "were given different batches", [](Setup& s, auto&) { s.steps = 77; }},
      {"a batch of another shape", "were given different batches", [](Setup& s, auto&) { s.steps = -1; }},
  };
  for (const Row& row : table) {
    INFO(row.name);
    std::array<int64_t, 2> payload = {};
    const auto messages = on_ranks(
        2, 1, Setup(), one_f_one_b(4),
        [&](PipelineRank& rank) {
          try {
            const auto [x, y] = rank.batch(rank.setup.steps == 77 ? 77 : Setup().steps);
            const bool is_reshaped = rank.setup.steps == -1;  // with the same numbers
            (void)rank.pass(is_reshaped ? x.view({4, -1}) : x, is_reshaped ? y.view({4, -1}) : y);
          } catch (...) {
            payload[static_cast<size_t>(rank.grid.stage())] =
                traffic_of(*rank.grid.world(), "send").bytes_sent;
            throw;
          }
        },
        [&](int rank, Setup& setup, PipelineSchedule& schedule) {
          if (rank == 1) row.change(setup, schedule);
        });
    for (const std::string& message : messages) REQUIRE_THAT(message, ContainsSubstring(row.says));
    REQUIRE(payload == std::array<int64_t, 2>{0, 0});
  }
}

TEST_CASE("what lies on other ranks keeps names and shapes and answers with a sentence", "[pipeline]") {
  const auto messages = on_ranks(2, 1, Setup(), one_f_one_b(4), [](PipelineRank& rank) {
    const auto all = rank.model->named_parameters();
    require(all.size() == make_model(Setup())->named_parameters().size(), "parameters are missing");
    const auto elsewhere = rank.grid.stage() == 0 ? all["head.weight"] : all["embedding.weight"];
    require(elsewhere.sizes() == at::IntArrayRef({kWords, kWidth}), "another shape");
    for (const std::function<void()>& touch :
         std::vector<std::function<void()>>{[&] { (void)(elsewhere + 1); }, [&] { (void)elsewhere.sum(); },
                                            [&] { (void)elsewhere.clone(); }}) {
      std::string message;
      try {
        touch();
      } catch (const std::exception& error) {
        message = error.what();
      }
      require(message.find("of the pipeline and has no values here") != std::string::npos, message);
    }
  });
  REQUIRE(first_of(messages) == "");
}

TEST_CASE("an evaluation that fails on one rank ends on the others, with its reason", "[pipeline]") {
  for (const int failing : {0, 1}) {
    CAPTURE(failing);
    const auto messages = on_ranks(2, 1, Setup(), one_f_one_b(4), [&](PipelineRank& rank) {
      rank.step(0);
      const auto [x, y] = rank.batch(1);
      const auto here = [&](Tensor value) {
        require(rank.grid.stage() != failing, "the user's own words");
        return value;
      };
      (void)rank.pipeline.evaluate(
          x, y, [&](Tensor tokens) { return here(rank.model->embed(tokens)); },
          [&](Tensor h, Tensor targets) { return here(rank.model->loss(h, targets)); });
    });
    const auto at = static_cast<size_t>(failing);
    CHECK_THAT(messages[at], ContainsSubstring("the user's own words"));
    CHECK_THAT(messages[1 - at], ContainsSubstring("evaluation failed: the user's own words"));
  }
}

TEST_CASE("a pipeline sends each activation and gradient once", "[pipeline]") {
  std::array<int64_t, 3> sent = {};
  Setup setup;
  const auto messages = on_ranks(3, 1, setup, one_f_one_b(4), [&](PipelineRank& rank) {
    const auto bytes = [&] { return traffic_of(*rank.grid.world(), "send").bytes_sent; };
    rank.step(0);  // shapes travel, too
    const int64_t before = bytes();
    rank.step(1);
    sent[static_cast<size_t>(rank.grid.stage())] = bytes() - before;
  });
  REQUIRE(first_of(messages) == "");
  const int64_t tensor = setup.rows * 12 * kWidth * 4;
  REQUIRE(sent == std::array<int64_t, 3>{4 * tensor, 8 * tensor, 4 * tensor});
}

namespace {

// The identity, whose node counts itself while it holds what backward needs.
std::array<std::atomic<int64_t>, 8> alive, most_alive;  // by stage
struct Counted : torch::autograd::Function<Counted> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, int64_t stage) {
    const auto at = static_cast<size_t>(stage);
    most_alive[at] = std::max<int64_t>(most_alive[at], ++alive[at]);
    ctx->saved_data["stage"] = stage;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list dy) {
    --alive[static_cast<size_t>(ctx->saved_data["stage"].toInt())];
    return {dy[0], Tensor()};
  }
};

}  // namespace

TEST_CASE("a rank holds as many micro-batches as its plan says", "[pipeline]") {
  for (const PipelineSchedule& schedule : {gpipe(6), one_f_one_b(6), zero_bubble(6)}) {
    for (auto* counts : {&alive, &most_alive}) {
      for (auto& count : *counts) count = 0;
    }
    const auto worlds = Communicator::in_process(3);
    Setup setup;
    setup.micro_batches = 6;
    std::vector<LanguageModel> models;
    for (int rank = 0; rank < 3; ++rank) models.push_back(make_model(setup));
    const auto messages = run_ranks(3, [&](int rank) {
      LanguageModel& model = models[static_cast<size_t>(rank)];
      const Grid grid(worlds[static_cast<size_t>(rank)], 3);
      const auto block = [&](size_t i, Tensor x) {
        const Tensor y = model->blocks->run(i, &BlockImpl::forward, x);
        return i % 2 == 0 ? Counted::apply(y, rank) : y;
      };
      const Pipeline pipeline(*model, model->blocks, block, grid, schedule, setup.options);
      const auto optimizer = setup.optimizer(pipeline.named_parameters());
      Session session(*model, *optimizer, worlds[static_cast<size_t>(rank)]);
      session.use(pipeline);
      const auto [x, y] = batch_of(12, 0);
      (void)pipeline.step(
          session, x, y, [&](Tensor tokens) { return model->embed(tokens); },
          [&](Tensor h, Tensor targets) { return model->loss(h, targets); });
      session.step();
      session.finish();
    });
    REQUIRE(first_of(messages) == "");
    for (int64_t rank = 0; rank < 3; ++rank) {
      INFO(schedule_name(schedule.order) << ", rank " << rank);
      PipelineSchedule of_three = schedule;
      of_three.ranks = 3;
      // Its first half is all that this node waits for.
      const double wanted = schedule.order == PipelineOrder::zero_bubble
                                ? std::min<double>(6, 3 - static_cast<double>(rank))
                                : pipeline_alive(of_three, rank);
      REQUIRE(static_cast<double>(most_alive[static_cast<size_t>(rank)]) == wanted);
    }
  }
}

TEST_CASE("blocks are timed as they were, the same on all ranks", "[pipeline]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<LanguageModel> models = {make_model(Setup()), make_model(Setup())};
  const auto before = models[0]->blocks->at<BlockImpl>(2).up->weight.clone();
  std::array<std::vector<double>, 2> seconds;
  const auto messages = run_ranks(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    LanguageModel& model = models[at];
    // A block that takes much longer than the others.
    const auto block = [&](size_t i, Tensor x) {
      const Tensor y = model->blocks->run(i, &BlockImpl::forward, x);
      if (i == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return y;
    };
    seconds[at] = time_blocks(model->blocks, block, {torch::ones({2, 12, kWidth})}, *worlds[at]);
  });
  REQUIRE(first_of(messages) == "");
  REQUIRE(seconds[0] == seconds[1]);
  REQUIRE(seconds[0].size() == 6);
  REQUIRE(seconds[0][1] >= 0.1);
  REQUIRE(*std::min_element(seconds[0].begin(), seconds[0].end()) > 0);
  REQUIRE(models[0]->blocks->at<BlockImpl>(2).up->weight.equal(before));
  for (const Tensor& parameter : models[0]->parameters()) REQUIRE(!parameter.grad().defined());
  REQUIRE_THROWS_WITH(time_blocks(models[0]->blocks, &BlockImpl::forward, {}, *worlds[0]),
                      ContainsSubstring("needs a sample"));
}

TEST_CASE("a grid has pipelines of stages, and replicas that follow one another", "[pipeline]") {
  const auto worlds = Communicator::in_process(6);
  std::array<std::array<int, 5>, 6> found = {};
  const auto messages = run_ranks(6, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    const Grid grid(worlds[at], 3);
    found[at] = {grid.stage(), grid.replicas()->rank(), grid.pipelines(), grid.rank_of(0), grid.rank_of(2)};
  });
  REQUIRE(first_of(messages) == "");
  for (int rank = 0; rank < 6; ++rank) {
    REQUIRE(found[static_cast<size_t>(rank)] ==
            std::array<int, 5>{rank / 2, rank % 2, 2, rank % 2, 4 + rank % 2});
  }
  REQUIRE_THROWS_WITH(Grid(worlds[0], 4), ContainsSubstring("6 ranks cannot be pipelines of 4 stages"));
  REQUIRE_THROWS_WITH(Grid(worlds[0], 0), ContainsSubstring("cannot be pipelines of 0 stages"));
}

TEST_CASE("a rank is told which blocks its stages have, and that it has no others", "[pipeline]") {
  std::array<std::pair<int64_t, int64_t>, 2> blocks;
  std::array<std::string, 2> refusals;
  const auto messages = on_ranks(2, 1, Setup(), one_f_one_b(4), [&](PipelineRank& rank) {
    const auto stage = static_cast<size_t>(rank.grid.stage());
    blocks[stage] = rank.pipeline.blocks_of(0);
    try {
      (void)rank.pipeline.blocks_of(1);
    } catch (const InvalidArgument& error) {
      refusals[stage] = error.what();
    }
  });
  REQUIRE(first_of(messages) == "");
  CHECK(blocks[0] == std::pair<int64_t, int64_t>(0, 3));
  CHECK(blocks[1] == std::pair<int64_t, int64_t>(3, 6));
  for (const std::string& refusal : refusals) {
    CHECK_THAT(refusal, ContainsSubstring("this rank has 1 stages of the Pipeline, and no stage 1"));
  }
}

namespace {

// How often rank 0 ran its blocks, and a gradient that does not leave the last stage before it ran one again.
std::atomic<int64_t> runs_of_first, runs_before;
std::atomic<bool> came_too_late;
struct HeldBack : torch::autograd::Function<HeldBack> {
  static Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                                 torch::autograd::variable_list dy) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (runs_of_first == runs_before && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    if (runs_of_first == runs_before) came_too_late = true;
    return dy;
  }
};

}  // namespace

TEST_CASE("a recomputed block runs again while its gradient is on its way", "[pipeline]") {
  runs_of_first = 0;
  came_too_late = false;
  Setup setup;
  setup.micro_batches = 1;
  runs_before = 3;  // three blocks, forward
  const auto worlds = Communicator::in_process(2);
  std::vector<LanguageModel> models = {make_model(setup), make_model(setup)};
  const auto messages = run_ranks(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    LanguageModel& model = models[at];
    const Grid grid(worlds[at], 2);
    const auto block = [&, rank](size_t i, Tensor x) {
      return model->blocks->run(
          i,
          [rank, own = model->blocks->ptr<BlockImpl>(i)](Tensor h) {
            if (rank == 0) ++runs_of_first;
            return own->forward(h);
          },
          x);
    };
    const Pipeline pipeline(*model, model->blocks, block, grid, gpipe(1), setup.options);
    const auto optimizer = setup.optimizer(pipeline.named_parameters());
    Session session(*model, *optimizer, worlds[at]);
    session.use(pipeline).use(Recompute(model->blocks));
    const auto [x, y] = batch_of(2, 0);
    (void)pipeline.step(
        session, x, y, [&](Tensor tokens) { return model->embed(tokens); },
        [&](Tensor h, Tensor targets) { return model->loss(HeldBack::apply(h), targets); });
    session.step();
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  REQUIRE(runs_of_first == 6);
  REQUIRE(!came_too_late);
}

}  // namespace pacer::testing::pipelines
