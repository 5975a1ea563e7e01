// Shards: against DataParallel, to the bit, with every optimizer that ranks can share and every pair of
// hooks; what it sends and keeps; checkpoints of any number of ranks; what it refuses.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <sstream>

#include <torch/serialize.h>

#include <pacer/schedulers/detail/checkpoint_files.h>
#include <pacer/schedulers/shards.h>
#include <pacer/schedulers/training_memory.h>
#include <pacer/sharding/parameter_shards.h>

#include "support/catch.h"
#include "support/cpu_memory.h"
#include "support/mistakes.h"
#include "support/rank_trainers.h"
#include "support/ranks.h"
#include "support/registry.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {
namespace shards {

using Runs = std::vector<std::unique_ptr<SmallRun>>;
using Adds = std::function<void(Session&, int rank)>;

const auto kSmallUnits = ShardsOptions().unit_bytes(600);

void data_parallel(Session& session, int) {
  session.use(DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)));
}
Adds sharded(Sharded what) {
  return [what](Session& session, int) { session.use(Shards(ShardsOptions(kSmallUnits).what(what))); };
}

Runs runs_of(const RegisteredOptimizer& optimizer, const std::vector<RegisteredHook>& hooks, int world_size,
             const Adds& add) {
  Runs runs;
  for (const auto& world : Communicator::in_process(world_size)) {
    runs.push_back(std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, world, /*own_random=*/false));
    add(*runs.back()->session, world->rank());
  }
  return runs;
}

std::string on_all(Runs& runs, const std::function<void(SmallRun&)>& f) {
  return first_of(
      run_ranks(static_cast<int>(runs.size()), [&](int rank) { f(*runs[static_cast<size_t>(rank)]); }));
}
std::string step_all(Runs& runs) {
  return on_all(runs, [](SmallRun& run) { run.step(); });
}

std::string model_difference(SmallRun& a, SmallRun& b) {
  return first_difference(detail::model_tensors(*a.model), detail::model_tensors(*b.model));
}

std::vector<RegisteredOptimizer> shared_optimizers() {
  auto all = all_optimizers();
  const auto is_whole = [](const RegisteredOptimizer& entry) {
    SmallModel model = small_model();
    model->to(entry.dtype);
    const auto optimizer = entry.make(model->named_parameters(), Communicator::alone(at::kCPU));
    const auto* own = dynamic_cast<SessionOptimizer*>(optimizer.get());
    return own == nullptr || !own->unshared_reason().empty();
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_whole), all.end());
  return all;
}

std::vector<RegisteredHook> hooks_named(const std::vector<std::string>& names) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (std::count(names.begin(), names.end(), hook.name)) hooks.push_back(hook);
  }
  REQUIRE(hooks.size() == names.size());
  return hooks;
}

class SpoiledLoss : public Hook {
 public:
  explicit SpoiledLoss(int64_t step) : step_(step) {}
  std::string hook_name() const override { return "spoiled_loss"; }
  Slot slot() const override { return Slot::loss; }
  void forward_begin(const Progress& progress) override { now_ = progress.step; }
  Tensor scale_loss(Tensor loss) override {
    return now_ == step_ ? loss * std::numeric_limits<float>::quiet_NaN() : loss;
  }

 private:
  int64_t step_, now_ = 0;
};

}  // namespace shards
}  // namespace

TEST_CASE("a layout gives every element of every tensor to exactly one rank", "[shards]") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 1 + static_cast<int>(random() % 7);
    std::vector<int64_t> counts(1 + random() % 6);
    for (int64_t& count : counts)
      count = static_cast<int64_t>(random() % 4 == 0 ? random() % 3 : random() % 2000);
    const ShardLayout layout(counts, ranks);
    CAPTURE(ranks, counts);
    REQUIRE(layout.elements() % (128 * ranks) == 0);
    int64_t end = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
      REQUIRE(layout.begin(t) % 128 == 0);
      REQUIRE(layout.begin(t) >= end);
      end = layout.begin(t) + counts[t];
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardPiece piece = layout.piece(t, rank);
        if (piece.count == 0) continue;
        REQUIRE(piece.first == next);
        REQUIRE(piece.offset >= 0);
        REQUIRE(piece.offset + piece.count <= layout.part_elements());
        REQUIRE(layout.begin(t) + piece.first == rank * layout.part_elements() + piece.offset);
        next += piece.count;
      }
      REQUIRE(next == counts[t]);
    }
    REQUIRE(end <= layout.elements());
    REQUIRE(layout.elements() < end + 128 * (ranks + 1));
  }
}

TEST_CASE("with every optimizer and every pair of hooks, Shards trains as DataParallel, to the bit",
          "[shards][session][data_parallel]") {
  using namespace shards;
  const auto hooks = all_hooks();
  const auto optimizers = shared_optimizers();
  REQUIRE(optimizers.size() == 7);
  int world_size = 1;
  size_t next = 0;
  for (size_t a = 0; a < hooks.size(); ++a) {
    for (size_t b = a; b < hooks.size(); ++b) {
      if (b > a && hooks[a].kind == hooks[b].kind) continue;
      std::vector<RegisteredHook> pair = {hooks[a]};
      if (b > a) pair.push_back(hooks[b]);
      world_size = world_size % 4 + 1;
      const bool accumulates =
          std::any_of(pair.begin(), pair.end(), [](const auto& hook) { return hook.kind == "accumulation"; });
      for (const Sharded what : {Sharded::state, Sharded::gradients}) {
        // Added over ranks in every micro-step, gradients add up in another order; see below.
        if (what == Sharded::gradients && accumulates) continue;
        const RegisteredOptimizer& optimizer = optimizers[next++ % optimizers.size()];
        INFO(optimizer.name << ", " << hooks[a].name << " with " << hooks[b].name << ", " << world_size
                            << " ranks, " << (what == Sharded::state ? "state" : "gradients"));
        Runs wanted = runs_of(optimizer, pair, world_size, data_parallel);
        Runs found = runs_of(optimizer, pair, world_size, sharded(what));
        for (int step = 0; step < 5; ++step) {
          REQUIRE(step_all(wanted) == "");
          REQUIRE(step_all(found) == "");
          for (auto& run : found) REQUIRE(model_difference(*wanted[0], *run) == "");
          REQUIRE(found[0]->session->progress().tokens == wanted[0]->session->progress().tokens);
        }
      }
    }
  }
}

TEST_CASE("a gradient that is not finite on one rank changes nothing on any", "[shards][session]") {
  using namespace shards;
  const auto optimizers = shared_optimizers();
  const auto add = [](const Adds& way) {
    return [way](Session& session, int rank) {
      way(session, rank);
      if (rank == 1)
        session.use(SpoiledLoss(2));
      else
        session.use(SpoiledLoss(-1));
    };
  };
  Runs wanted = runs_of(optimizers[0], hooks_named({"clipping"}), 3, add(data_parallel));
  Runs found = runs_of(optimizers[0], hooks_named({"clipping"}), 3, add(sharded(Sharded::gradients)));
  for (int step = 0; step < 5; ++step) {
    const auto before = found[0]->state().model;
    REQUIRE(step_all(wanted) == "");
    REQUIRE(step_all(found) == "");
    for (auto& run : found) REQUIRE(model_difference(*wanted[0], *run) == "");
    REQUIRE((first_difference(before, found[0]->state().model) == "") == (step == 2));
  }
  for (auto& run : found) REQUIRE(run->session->skipped_steps() == 1);
}

// Whole numbers, whose sums are exact in any order.
TEST_CASE("parts hold the sums over ranks and backward passes, of odd parameters, too", "[shards]") {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const auto& [every, unit_bytes] :
         {std::pair(false, 1000), std::pair(true, 1000), std::pair(true, 1)}) {
      CAPTURE(world_size, every, unit_bytes);
      const auto worlds = Communicator::in_process(world_size);
      const auto options_of_shards =
          ParameterShardsOptions().unit_bytes(unit_bytes).reduce_every_backward(every);
      const auto messages = run_ranks(world_size, [&](int rank) {
        const auto options = torch::TensorOptions().requires_grad(true);
        const std::vector<std::pair<std::string, Tensor>> named = {
            {"large", torch::zeros({37, 41}, options)},
            {"one", torch::zeros({}, options)},
            {"empty", torch::zeros({0, 3}, options)},
            {"double", torch::zeros({5, 60}, options.dtype(torch::kDouble))},
            {"frozen", torch::zeros({3})},
            {"late", torch::zeros({7}, options)},
            {"first window only", torch::zeros({9}, options)}};
        ParameterShards shards(named, worlds[static_cast<size_t>(rank)], options_of_shards);
        // Whether backward reaches the parameter.
        const auto reaches = [](const std::string& name, int window, int pass) {
          return name != "frozen" && (name != "late" || pass > 0) &&
                 (name != "first window only" || window == 0);
        };
        for (int window = 0; window < 2; ++window) {
          for (int pass = 0; pass < 3; ++pass) {
            ParameterShards::Pass now;
            now.is_last = pass == 2;
            Tensor loss = torch::zeros({}, torch::kDouble);
            for (const auto& [name, parameter] : named) {
              if (!reaches(name, window, pass)) {
                now.absent.push_back(parameter);
                if (window == 1 && name != "late") now.absent_in_all.push_back(parameter);
                continue;
              }
              const Tensor factor =
                  torch::arange(parameter.numel(), parameter.options().requires_grad(false));
              loss = loss + ((factor.view(parameter.sizes()) + (rank + 1) * (pass + 1)) * parameter).sum();
            }
            shards.begin_backward(now);
            loss.backward();
            for (const auto& [name, parameter] : named) {
              require(!parameter.grad().defined(), name, " kept its gradient");
            }
            shards.end_backward();
          }
          shards.wait();
          for (const auto& part : shards.parts()) {
            int passes = 0, sum_of_passes = 0;
            for (int pass = 0; pass < 3; ++pass) {
              passes += reaches(part.name, window, pass);
              sum_of_passes += reaches(part.name, window, pass) ? pass + 1 : 0;
            }
            const int sum_of_ranks = world_size * (world_size + 1) / 2;
            const Tensor wanted =
                torch::arange(part.first, part.first + part.count, part.gradient.options()) * passes *
                    world_size +
                static_cast<double>(sum_of_passes * sum_of_ranks);
            require(part.gradient.equal(wanted), part.name, " has another sum in window ", window);
          }
        }
        // New values of the parts reach all ranks.
        const at::NoGradGuard no_grad;
        for (const auto& part : shards.parts()) {
          part.parameter.view({-1}).fill_(-1);
          part.parameter.view({-1})
              .narrow(0, part.first, part.count)
              .copy_(torch::arange(part.first, part.first + part.count));
        }
        shards.gather_parameters();
        for (const auto& part : shards.parts()) {
          const Tensor wanted = torch::arange(part.parameter.numel(), part.gradient.options());
          require(part.parameter.view({-1}).equal(wanted), part.name, " has other values after the gather");
        }
      });
      REQUIRE(first_of(messages) == "");
    }
  }
}

TEST_CASE("fp16 gradients whose sum overflows are divided before they are added", "[shards]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    const Tensor parameter =
        torch::zeros({300}, torch::TensorOptions().dtype(torch::kHalf).requires_grad(true));
    ParameterShards shards({{"half", parameter}}, worlds[static_cast<size_t>(rank)]);
    shards.begin_backward();
    (parameter * 40'000).sum().backward();
    shards.end_backward();
    shards.wait();
    const Tensor& gradient = shards.parts()[0].gradient;
    require(shards.scale() == 0.5 && gradient.eq(40'000).all().item<bool>(), "the mean is another");
  });
  REQUIRE(first_of(messages) == "");
}

// Tensors of which several ranks have a part; those of the registry are each one rank's. Nothing looks at
// their norm, whose last digit depends on who adds up what.
TEST_CASE("large tensors train and resume as whole ones, to the bit", "[shards][session][resume]") {
  const auto trained = [](int world_size, bool sharded, const std::string& folder, int64_t steps,
                          bool resumes) {
    RankSetup setup;
    setup.widths = {40, 60, 7};
    setup.reduction = [sharded](Session& session) {
      if (sharded) {
        session.use(Shards(ShardsOptions().unit_bytes(4000)));
      } else {
        session.use(DataParallel());
      }
    };
    setup.hooks = [&](Session& session) {
      session.use(Checkpoints(CheckpointsOptions(folder).every(3).synchronous(true)));
    };
    setup.options = FusedAdamWOptions(0.01).amsgrad(true);
    const CapturedStderr quiet;
    auto trainers = trainers_of(std::vector<RankSetup>(static_cast<size_t>(world_size), setup));
    REQUIRE(first_of(run_all(trainers, [&](RankTrainer& t, int rank) {
              if (resumes) require(t.session->resume() == 3, "nothing was resumed");
              t.inputs = torch::arange(80, torch::kFloat).view({2, 40}) / 40 + rank;
              for (int64_t step = 0; step < steps; ++step) t.step();
            })) == "");
    auto values = trainers.front()->snapshot();
    for (auto& trainer : trainers) {
      const auto others = trainer->snapshot();
      for (size_t i = 0; i < values.size(); ++i) REQUIRE(others[i].equal(values[i]));
    }
    return values;
  };
  for (const int world_size : {2, 3, 5}) {
    const TemporaryFolder whole, parts;
    const auto wanted = trained(world_size, false, whole.path(), 3, false);
    const auto found = trained(world_size, true, parts.path(), 3, false);
    for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(found[i].equal(wanted[i]));
    for (const int after : {1, 2, 4}) {
      const TemporaryFolder a, b;
      std::filesystem::copy(whole.path(), a.path(), std::filesystem::copy_options::recursive);
      std::filesystem::copy(parts.path(), b.path(), std::filesystem::copy_options::recursive);
      const auto next = trained(after, false, a.path(), 3, true),
                 also = trained(after, true, b.path(), 3, true);
      for (size_t i = 0; i < next.size(); ++i) REQUIRE(also[i].equal(next[i]));
    }
  }
}

TEST_CASE("gradients that travel in every micro-step add up to those that travel once", "[shards][session]") {
  using namespace shards;
  for (const char* hook : {"accumulation", "accumulation by tokens"}) {
    Runs once = runs_of(shared_optimizers()[0], hooks_named({hook}), 3, sharded(Sharded::state));
    Runs always = runs_of(shared_optimizers()[0], hooks_named({hook}), 3, sharded(Sharded::gradients));
    for (int step = 0; step < 4; ++step) {
      REQUIRE(step_all(once) == "");
      REQUIRE(step_all(always) == "");
      const auto a = once[0]->state().model, b = always[0]->state().model;
      // Adam divides by the root of the second moment, so a gradient near zero is as large as any other.
      for (const auto& [name, tensor] : a) REQUIRE(tensor.allclose(b.at(name), 1e-3, 1e-4));
      for (auto& run : always) REQUIRE(model_difference(*always[0], *run) == "");
    }
  }
}

TEST_CASE("a window that ends early takes its step with what it has", "[shards][session]") {
  using namespace shards;
  for (const Sharded what : {Sharded::state, Sharded::gradients}) {
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
    const auto a = wanted[0]->state().model, b = found[0]->state().model;
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
  const auto* shards = runs[0]->session->hooks().empty() ? nullptr : runs[0]->parts->find<Shards>()->shards();
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
  constexpr int64_t kNorms = kSteps * (kRanks - 1) * 8;  // finite_check: a double of each rank
  REQUIRE(before("all_gather").bytes_sent - gathered.bytes_sent == sent + kNorms);
  REQUIRE(before("reduce_scatter").calls - reduced.calls == kSteps * units);
}

// What all ranks together have allocated at the peak of a step. Beside the plan: a few gradients of one layer
// on their way through autograd, flat memory and the transport, activations, and padding to 128 W elements.
TEST_CASE("training takes the memory that training_memory says", "[shards][session]") {
  constexpr int kRanks = 4;
  constexpr int64_t kLayers = 40, kWide = 128, kParameters = kLayers * kWide * (kWide + 1);
  struct Case {
    std::string name;
    at::ScalarType dtype;
    MasterWeights master;
  };
  const std::vector<Case> cases = {{"fp32", at::kFloat, MasterWeights::automatic},
                                   {"bf16", at::kBFloat16, MasterWeights::automatic},
                                   {"bf16 with masters", at::kBFloat16, MasterWeights::fp32},
                                   {"bf16 alone", at::kBFloat16, MasterWeights::none}};
  for (const Case& c : cases) {
    const auto layer = static_cast<int64_t>(c10::elementSize(c.dtype)) * kWide * (kWide + 1);
    for (const auto sharded :
         {std::optional<Sharded>(), std::optional(Sharded::state), std::optional(Sharded::gradients)}) {
      RankSetup setup;
      setup.widths = std::vector<int64_t>(kLayers + 1, kWide);
      setup.dtype = c.dtype;
      setup.options = FusedAdamWOptions(0.01).master_weights(c.master);
      setup.reduction = [&, sharded](Session& session) {
        if (sharded) {
          session.use(Shards(ShardsOptions().what(*sharded).unit_bytes(layer)));
        } else {
          session.use(DataParallel(DataParallelOptions().bucket_bytes(layer).first_bucket_bytes(layer)));
        }
      };
      auto options = TrainingMemoryOptions(kParameters).ranks(kRanks).dtype(c.dtype).master_weights(c.master);
      const TrainingMemory plan = training_memory(options.sharded(sharded).unit_bytes(layer));
      const CountedCpuMemory memory;
      const int64_t before = CountedCpuMemory::live();
      auto trainers = trainers_of(std::vector<RankSetup>(kRanks, setup));
      const auto step = [](RankTrainer& t, int) { t.step(); };
      REQUIRE(first_of(run_all(trainers, step)) == "");
      CountedCpuMemory::reset_peak();
      REQUIRE(first_of(run_all(trainers, step)) == "");
      const int64_t found = (CountedCpuMemory::peak() - before) / kRanks;
      CAPTURE(c.name, sharded.has_value(), plan.total(), found, layer);
      INFO("Sharded::" << (sharded == Sharded::state ? "state" : "gradients"));
      // Ranks that keep whole gradients do not all reach their peak at the same moment.
      CHECK(found > (sharded == Sharded::state ? plan.total() / 10 * 9 : plan.total() - layer));
      CHECK(found < plan.total() + plan.total() / 50 + 5 * layer);
    }
  }
  SECTION("as the documentation's table") {
    const auto gigabytes = [](std::optional<Sharded> sharded) {
      const auto options = TrainingMemoryOptions(7'000'000'000).ranks(8).sharded(sharded);
      return static_cast<double>(training_memory(options).total()) / 1e9;
    };
    CHECK(gigabytes(std::nullopt) == Catch::Approx(112));
    CHECK(gigabytes(Sharded::state) == Catch::Approx(66.5));
    CHECK(gigabytes(Sharded::gradients) == Catch::Approx(38.5 + 0.0524).epsilon(1e-3));
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).ranks(0)), InvalidArgument);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).dtype(at::kLong)), InvalidArgument);
  }
}

TEST_CASE("checkpoints of any number of ranks, sharded or not, are resumed by any other",
          "[shards][session][resume][ranks]") {
  using namespace shards;
  const auto optimizers = shared_optimizers();
  const auto hooks = hooks_named({"clipping", "learning rate", "sampler"});
  const auto runs_in = [&](const std::string& folder, const RegisteredOptimizer& optimizer, int world_size,
                           const Adds& way, bool synchronous) {
    return runs_of(optimizer, hooks, world_size, [&, way](Session& session, int rank) {
      if (world_size > 1) way(session, rank);
      session.use(Checkpoints(CheckpointsOptions(folder).every(3).keep(100).synchronous(synchronous)));
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
  for (const int before : {1, 2, 3, 4, 7}) {
    for (const bool saves_sharded : {false, true}) {
      if (before == 1 && saves_sharded) continue;
      const RegisteredOptimizer& optimizer = optimizers[next++ % optimizers.size()];
      const TemporaryFolder folder;
      Runs saved = runs_in(folder.path(), optimizer, before,
                           saves_sharded ? sharded(Sharded::gradients) : Adds(data_parallel), next % 2 == 0);
      for (int step = 0; step < 3; ++step) REQUIRE(step_all(saved) == "");
      saved.clear();
      for (const int after : {1, 2, 3, 4, 7}) {
        INFO(optimizer.name << ", from " << before << (saves_sharded ? " shards" : " replicas") << " to "
                            << after);
        const TemporaryFolder a, b;
        for (const TemporaryFolder* copy : {&a, &b}) {
          std::filesystem::copy(folder.path(), copy->path(), std::filesystem::copy_options::recursive);
        }
        Runs wanted = runs_in(a.path(), optimizer, after, data_parallel, true);
        Runs found = runs_in(b.path(), optimizer, after, sharded(Sharded::state), true);
        REQUIRE(resume(wanted) == "");
        REQUIRE(resume(found) == "");
        for (int step = 0; step < 3; ++step) {  // the last one saves
          REQUIRE(model_difference(*wanted[0], *found[0]) == "");
          REQUIRE(step_all(wanted) == "");
          REQUIRE(step_all(found) == "");
        }
        REQUIRE(model_difference(*wanted[0], *found[0]) == "");
        // What both then save is the same, too.
        const auto whole = [&](const TemporaryFolder& of, Runs& runs) {
          return detail::read_state(*runs[0]->parts, detail::find_newest(of.path())).optimizer;
        };
        REQUIRE(first_difference(whole(a, wanted), whole(b, found)) == "");
      }
    }
  }
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

TEST_CASE("mistakes with Shards are told in a sentence", "[shards][mistakes]") {
  using namespace shards;
  const auto train = [](
                         const std::function<void(RankTrainer&)>& then,
                         const std::function<void(RankSetup&)>& set_up = [](RankSetup&) {}) {
    return [=] {
      RankSetup setup;
      setup.reduction = [](Session& session) { session.use(Shards()); };
      set_up(setup);
      auto trainers = trainers_of(std::vector<RankSetup>(2, setup));
      const std::string message = first_of(run_all(trainers, [&](RankTrainer& t, int) {
        t.step();
        then(t);
      }));
      if (!message.empty()) throw Error(message);
    };
  };
  const auto with_optimizer = [](const char* name) {
    return [name] {
      for (const RegisteredOptimizer& entry : all_optimizers()) {
        if (entry.name != name) continue;
        SmallRun run(entry, {}, 0, Communicator::in_process(1)[0], false);
        run.session->use(Shards());
      }
    };
  };
  const std::vector<Mistake> mistakes = {
      {"torch's AdamW", {"whole parameters", "FusedAdamW"}, with_optimizer("AdamW")},
      {"LAMB", {"norms of whole parameters", "DataParallel"}, with_optimizer("FusedLamb")},
      {"1-bit Adam", {"momentum of whole parameters"}, with_optimizer("OneBitAdam")},
      {"no Communicator",
       {"hook shards", "Communicator"},
       [] {
         SmallModel model = small_model();
         FusedAdamW optimizer(model->parameters());
         Session(*model, optimizer).use(Shards());
       }},
      {"beside DataParallel",
       {"data_parallel", "shards", "use one of them"},
       train([](RankTrainer&) {},
             [](RankSetup& s) { s.hooks = [](Session& session) { session.use(DataParallel()); }; })},
      {"with CudaGraph",
       {"CudaGraph"},
       train([](RankTrainer&) {},
             [](RankSetup& s) { s.hooks = [](Session& session) { session.use(CudaGraph()); }; })},
      {"units of nothing",
       {"unit_bytes", "at least 1"},
       train([](RankTrainer&) {},
             [](RankSetup& s) {
               s.reduction = [](Session& session) { session.use(Shards(ShardsOptions().unit_bytes(0))); };
             })},
      {"other units on one rank",
       {"disagree", "units of"},
       [] {
         RankSetup a, b;
         a.reduction = [](Session& session) { session.use(Shards()); };
         b.reduction = [](Session& session) { session.use(Shards(ShardsOptions().unit_bytes(100))); };
         auto trainers = trainers_of({a, b});
         const auto messages = run_all(trainers, [](RankTrainer& t, int) { t.step(); });
         require(messages[0] == messages[1], "the ranks say different things: ", messages[0], messages[1]);
         throw Error(messages[0]);
       }},
      {"a layer frozen later", {"frozen", "new Session"}, train([](RankTrainer& t) {
         t.model->parameters().front().requires_grad_(false);
         t.step();
       })},
      {"moved to another dtype", {"0.weight", "was moved"}, train([](RankTrainer& t) {
         t.model->parameters().front().set_data(torch::ones({6, 4}));
         t.step();
       })},
      {"a gradient by hand", {"gradient of its own", "0.weight"}, train([](RankTrainer& t) {
         t.begin_and_backward();
         t.model->parameters().front().mutable_grad() = torch::ones({6, 4});
         t.session->step();
       })},
      {"a step without the Session", {"leave steps to the Session"}, train([](RankTrainer& t) {
         t.optimizer->step();
       })},
      {"a Session without Shards afterwards", {"use Shards again"}, train([](RankTrainer& t) {
         t.session->finish();
         Session next(*t.model, *t.optimizer, t.parts->shared_world());
         (void)next.begin(t.inputs);
       })},
      {"other parts in a later Session", {"in other parts"}, train([](RankTrainer& t) {
         t.session->finish();
         const auto world = t.parts->shared_world();
         t.session.reset();
         Session next(*t.model, *t.optimizer, world);
         next.use(Shards(ShardsOptions().unit_bytes(1)));
         (void)next.begin(t.inputs);
       })},
      {"saved as an archive", {"whole parameters", "Checkpoints"}, train([](RankTrainer& t) {
         std::ostringstream out;
         torch::save(*t.optimizer, out);
       })},
      {"a parameter that backward does not reach", {"not at all", "0.weight"}, train([](RankTrainer& t) {
         auto [x] = t.session->begin(torch::ones({2, 6}));
         t.session->backward(t.model[1]->as<torch::nn::Linear>()->forward(x).square().mean());
       })},
      {"one that is not contiguous",
       {"not contiguous", "0.weight"},
       train([](RankTrainer&) {},
             [](RankSetup& s) {
               s.change_model = [](torch::nn::Sequential& model) {
                 model->parameters().front().set_data(torch::ones({4, 6}).t());
               };
             })},
  };
  CHECK(faults_of(mistakes) == "");
}

}  // namespace pacer::testing
