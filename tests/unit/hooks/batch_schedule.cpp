// Batches that grow: how many micro-steps there are when, and that a Session takes as many.
#include <torch/optim/sgd.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/batch_schedule.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/step_report.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/session/mistakes.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

Progress at_step(int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

RegisteredHook growing(const BatchSchedule& schedule) {
  return {"growing", "accumulation", false, [schedule](Session& session, SmallModel&, EpochSampler&) {
            session.use(GradientAccumulation(schedule));
          }};
}

// Remembers what the last step reported.
struct Reported : Hook {
  std::string hook_name() const override { return "reported"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override { numbers = report.numbers(); }
  std::vector<std::pair<std::string, double>> numbers;
};

// How many micro-steps each of the next steps takes.
std::vector<int64_t> windows_of(SmallRun& run, int steps) {
  std::vector<int64_t> windows;
  for (int step = 0; step < steps; ++step) {
    windows.push_back(run.session->progress().micro_steps);
    int64_t backwards = 0;
    run.step([&](SmallModel&) { backwards = run.session->progress().micro_step + 1; });
    CHECK(backwards == windows.back());
  }
  return windows;
}

}  // namespace

TEST_CASE("a batch changes at the boundaries of its table", "[hooks][batch_schedule]") {
  const BatchSchedule steps = BatchSchedule(4).table({{10, 8}, {30, 2}});
  const struct {
    int64_t step, micro_steps;
  } cases[] = {{0, 4}, {9, 4}, {10, 8}, {29, 8}, {30, 2}, {1'000'000, 2}};
  for (const auto& each : cases) {
    CHECK(steps.micro_steps(at_step(each.step)) == each.micro_steps);
    CHECK(BatchSchedule(steps).by_tokens().micro_steps(at_step(7, each.step)) == each.micro_steps);
  }
  CHECK(steps.most() == 8);
  CHECK_FALSE(steps.settled(at_step(29)));
  CHECK(steps.settled(at_step(30)));
  CHECK(steps.describe() == "4 micro-steps, 8 from step 10, 2 from step 30");

  const BatchSchedule doubled = BatchSchedule(3).doubling(100, 24).by_tokens();
  CHECK(doubled.describe() == "3 micro-steps, 6 from token 100, 12 from token 200, 24 from token 300");
  CHECK(doubled.micro_steps(at_step(900, 299)) == 12);
}

TEST_CASE("mistakes with a batch that grows are told in a sentence", "[hooks][batch_schedule][mistakes]") {
  const auto made = [](const std::function<void()>& make) { return make; };
  const std::vector<Mistake> mistakes = {
      {"no micro-step", {"between 1 and 2^24 - 1", "not 0"}, made([] { BatchSchedule(0); })},
      {"an empty table", {"at least one boundary"}, made([] { BatchSchedule(1).table({}); })},
      {"boundaries that fall", {"increase", "5 follows 9"}, made([] {
         BatchSchedule(1).table({{9, 2}, {5, 4}});
       })},
      {"a boundary at the start", {"begin at 1"}, made([] {
         BatchSchedule(1).table({{0, 2}});
       })},
      {"too many", {"2^24 - 1"}, made([] {
         BatchSchedule(1).table({{4, 1 << 24}});
       })},
      {"no power of two", {"12 micro-steps are not 2, 4, 8"}, made([] {
         BatchSchedule(4).doubling(10, 12);
       })},
      {"no doubling at all", {"4 micro-steps are not"}, made([] { BatchSchedule(4).doubling(10, 4); })},
      {"no time between", {"1 ... 2^56, not 0"}, made([] { BatchSchedule(4).doubling(0, 8); })},
      {"twice", {"twice", "leave one out"}, made([] {
         BatchSchedule(4).doubling(9, 8).table({{4, 2}});
       })},
      {"nothing that changes", {"call table or doubling"}, made([] {
         GradientAccumulation{BatchSchedule(4)};
       })},
      {"two numbers", {"micro_steps and a schedule"}, made([] {
         GradientAccumulation(GradientAccumulationOptions(BatchSchedule(4).table({{2, 8}})).micro_steps(5));
       })},
  };
  CHECK(faults_of(mistakes) == "");
}

TEST_CASE("a Session takes the micro-steps of the schedule, and their mean", "[hooks][batch_schedule]") {
  for (const char* optimizer : {"SGD", "FusedAdamW", "FusedAdamW bf16 remainder"}) {
    INFO(optimizer);
    const RegisteredOptimizer entry = registered_optimizer(optimizer);
    SmallRun run(entry, {growing(BatchSchedule(1).table({{2, 3}, {4, 2}}))}, /*dropout=*/0);
    auto reported = std::make_shared<Reported>();
    run.session->use(reported);
    // The same windows by hand.
    SmallModel model = small_model();
    model->to(entry.dtype);
    const auto by_hand = entry.make(model->named_parameters(), nullptr);
    int64_t step = 0;
    for (const int64_t window : {1, 1, 3, 3, 2, 2}) {
      CHECK(windows_of(run, 1).front() == window);
      CHECK(reported->numbers ==
            std::vector<std::pair<std::string, double>>{{"micro_steps", double(window)}});
      std::vector<Tensor> sums;
      for (int64_t m = 0; m < window; ++m) {
        const auto [x, y] = small_batch(step * run.parts->micro_steps + m);
        model->loss(x, y).backward();
        for (size_t i = 0; i < model->parameters().size(); ++i) {
          const Tensor gradient = model->parameters()[i].grad().to(at::kDouble);
          m == 0 ? sums.push_back(gradient) : static_cast<void>(sums[i] += gradient);
          model->parameters()[i].mutable_grad().reset();
        }
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        const Tensor mean = sums[i] / static_cast<double>(window);
        model->parameters()[i].mutable_grad() = mean.to(entry.dtype);
      }
      by_hand->step();
      by_hand->zero_grad();
      ++step;
    }
    // Gradients rounded in other places; steps of Adam are of size 0.01.
    CHECK(distance(run.model->parameters(), model->parameters()) < (entry.dtype == at::kFloat ? 2e-5 : 2e-2));
  }
}

TEST_CASE("all ranks change their batch in the same step, and so does a resumed run",
          "[hooks][batch_schedule][ranks][resume]") {
  const TemporaryFolder folder;
  // A step of one micro-step has 2 ranks x 2 x 16 = 64 tokens.
  const auto schedule = BatchSchedule(1).table({{128, 2}, {384, 4}}).by_tokens();
  const auto runs_of = [&](int ranks) {
    SmallRuns runs;
    for (const auto& world : Communicator::in_process(ranks)) {
      runs.push_back(std::make_unique<SmallRun>(registered_optimizer("FusedAdamW"),
                                                std::vector<RegisteredHook>{growing(schedule)}, /*dropout=*/0,
                                                world, /*own_random=*/false));
      runs.back()->session->use(Checkpoints(CheckpointsOptions(folder.path()).every(3).synchronous(true)));
    }
    return runs;
  };
  const auto windows = [](SmallRuns& runs, int steps) {
    std::vector<std::vector<int64_t>> all(runs.size());
    REQUIRE(first_of(on_all_ranks(runs, [&](SmallRun& run, int rank) {
              for (int step = 0; step < steps; ++step) {
                all[static_cast<size_t>(rank)].push_back(run.session->progress().micro_steps);
                run.step();
              }
            })) == "");
    for (const auto& other : all) CHECK(other == all.front());
    return all.front();
  };
  SmallRuns whole = runs_of(2);
  CHECK(windows(whole, 3) == std::vector<int64_t>{1, 1, 2});
  SmallRuns resumed = runs_of(2);
  const std::string said = [&] {
    const CapturedStderr told;
    REQUIRE(first_of(on_all_ranks(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
    return told.text();
  }();
  CHECK_FALSE(contains(said, "micro-batches"));  // the steps of both take as many
  CHECK(windows(whole, 4) == std::vector<int64_t>{2, 4, 4, 4});
  CHECK(windows(resumed, 4) == std::vector<int64_t>{2, 4, 4, 4});
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(first_difference(whole[rank]->state(), resumed[rank]->state()) == "");
  }
}

TEST_CASE("ranks compare their schedules, and nothing is frozen while the batch grows",
          "[hooks][batch_schedule][mistakes]") {
  const auto worlds = Communicator::in_process(2);
  SmallRuns runs;
  for (int rank = 0; rank < 2; ++rank) {
    runs.push_back(std::make_unique<SmallRun>(
        registered_optimizer("FusedAdamW"),
        std::vector<RegisteredHook>{growing(BatchSchedule(1).table({{5 + rank, 2}}))}, /*dropout=*/0,
        worlds[static_cast<size_t>(rank)], /*own_random=*/false));
  }
  CHECK(contains(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })), "2 from step 6"));

  SmallModel model = small_model();
  OneBitAdam optimizer(model->named_parameters(),
                       OneBitAdamOptions(1e-3).freeze_step(3).compress_alone(true));
  Session session(*model, optimizer);
  session.use(GradientAccumulation(BatchSchedule(1).table({{5, 2}})));
  const auto batch = small_batch(0);
  CHECK(contains(refusal([&] { static_cast<void>(session.begin(batch.first, batch.second)); }),
                 "gradient_accumulation"));
}

}  // namespace pacer::testing
