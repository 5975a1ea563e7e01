// Validation and what follows from its value: the end of training, and the best model kept.
#include <cmath>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include <ATen/autocast_mode.h>
#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/files/file_system.h>
#include <pacer/hooks/precision.h>
#include <pacer/session/early_stopping.h>
#include <pacer/session/save_best.h>
#include <pacer/session/validation.h>

#include "support/captured_stderr.h"
#include "support/collectives/ranks.h"
#include "support/metrics/metrics_run.h"

namespace pacer::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Gives the values one after the other, then the last again and again.
std::function<double()> measured(std::vector<double> values) {
  return [values = std::move(values), next = size_t{0}]() mutable {
    return values[std::min(next++, values.size() - 1)];
  };
}

NamedTensors tensors_in(const std::string& path) {
  FileReader reader(posix_file_system(), path);
  return detail::read_tensors(reader, path);
}

bool holds_the_weights(const std::string& path, const SmallModel& model) {
  const NamedTensors saved = tensors_in(path);
  const auto named = model->named_parameters();
  if (saved.size() != named.size()) return false;
  for (const auto& item : named) {
    const auto found = saved.find(item.key());
    if (found == saved.end() || !found->second.equal(item.value())) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("a value is better by more than min_delta, in its direction, and NaN never is",
          "[session][validation]") {
  BestValue best;
  CHECK_FALSE(best.take(kNan, 1, 0, false));
  CHECK(best.since == 1);
  CHECK(best.take(2.0, 2, 0, false));
  CHECK(best.since == 0);
  CHECK_FALSE(best.take(2.0, 3, 0, false));
  CHECK_FALSE(best.take(1.5, 4, 0.5, false));
  CHECK(best.since == 2);
  CHECK(best.take(1.25, 5, 0.5, false));
  CHECK(best.value == 1.25);
  CHECK(best.step == 5);
  CHECK_FALSE(best.take(1.0, 6, 0, true));
  CHECK(best.take(1.5, 7, 0, true));
  CHECK(best.take(std::numeric_limits<double>::infinity(), 8, 0, true));
}

TEST_CASE("validation runs every so many steps and at the end, in evaluation mode", "[session][validation]") {
  const TemporaryFolder folder;
  MetricsRun run;
  std::vector<int64_t> steps;
  run.session.use(Metrics(quiet_metrics(folder).every(3)))
      .use(Precision::bf16())
      .use(Validation(ValidationOptions(2).name("held_out"), [&] {
        CHECK_FALSE(run.model->is_training());
        CHECK_FALSE(torch::GradMode::is_enabled());
        CHECK(at::autocast::is_autocast_enabled(at::kCPU));
        steps.push_back(run.session.progress().step);
        return 10.0 + static_cast<double>(steps.size());
      }));
  run.steps(5);
  CHECK(run.model->is_training());
  CHECK(torch::GradMode::is_enabled());
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(steps == std::vector<int64_t>{2, 4});
  run.session.finish();
  CHECK(steps == std::vector<int64_t>{2, 4, 5});
  // A record of its own where no other was due, and one for what was measured at the end.
  REQUIRE(metrics_steps(folder) == std::vector<int64_t>{2, 3, 4, 5});
  const auto lines = metrics_lines(folder);
  for (const size_t i : {0, 2, 3}) REQUIRE(lines[i].contains("held_out"));
  CHECK(lines[0]["held_out"] == 11);
  CHECK_FALSE(lines[1].contains("held_out"));
  CHECK(lines[2]["held_out"] == 12);
  CHECK(lines[3]["held_out"] == 13);
  CHECK_FALSE(lines[3].contains("loss"));
  check_csv_equals_jsonl(folder);
}

TEST_CASE("a last step that was measured is not measured again", "[session][validation]") {
  MetricsRun run;
  int calls = 0;
  run.session.use(Validation(2, [&] { return ++calls; }));
  run.steps(4);
  run.session.finish();
  CHECK(calls == 2);
}

TEST_CASE("training stops when validation no longer improves, whatever the order of use",
          "[session][validation]") {
  for (const bool reversed : {false, true}) {
    CAPTURE(reversed);
    MetricsRun run;
    const std::vector<double> values = {3.0, 2.0, 2.5, kNan, 2.0, 1.0};
    if (reversed) run.session.use(EarlyStopping(3));
    run.session.use(Validation(2, measured(values)));
    if (!reversed) run.session.use(EarlyStopping(3));
    while (!run.session.should_stop() && run.session.progress().step < 40) run.steps(1);
    CHECK(run.session.progress().step == 10);
    CHECK(contains(run.session.stop_reason(), "validation_loss has not improved in 3 measurements"));
    CHECK(contains(run.session.stop_reason(), "since step 4"));
  }
  MetricsRun rising;
  rising.session.use(EarlyStopping(EarlyStoppingOptions(2).min_delta(0.25)))
      .use(Validation(ValidationOptions(1).larger_is_better(true), measured({0.5, 0.8, 1.06, 1.07, 1.3})));
  while (!rising.session.should_stop() && rising.session.progress().step < 40) rising.steps(1);
  CHECK(rising.session.progress().step == 5);  // 1.06 after 0.8 counts, the next two do not
}

TEST_CASE("patience goes on where a resumed run left it, and a run that had stopped stays stopped",
          "[session][validation]") {
  const TemporaryFolder folder;
  const auto begin_run = [&](MetricsRun& run, std::vector<double> values, int64_t patience) {
    run.session.use(Validation(1, measured(std::move(values))))
        .use(EarlyStopping(patience))
        .use(Checkpoints(CheckpointsOptions(folder.path()).every(1)));
    const CapturedStderr quiet;
    run.session.resume();
  };
  {
    MetricsRun run;
    begin_run(run, {1.0, 2.0, 2.0}, 4);
    run.steps(3);
    CHECK_FALSE(run.session.should_stop());
  }
  {
    MetricsRun run;
    begin_run(run, {2.0}, 4);
    run.steps(1);
    CHECK_FALSE(run.session.should_stop());
    run.steps(1);
    CHECK(run.session.should_stop());
    CHECK(contains(run.session.stop_reason(), "since step 1, where it was 1"));
  }
  MetricsRun stopped, patient;
  begin_run(stopped, {2.0}, 4);
  CHECK(stopped.session.should_stop());
  begin_run(patient, {2.0}, 5);
  CHECK_FALSE(patient.session.should_stop());
}

TEST_CASE("the best model is on the disk, not the last", "[session][validation]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("deep/best/model.safetensors");
  MetricsRun run;
  run.session.use(SaveBest(folder.path("deep/best"))).use(Validation(1, measured({3, 2, kNan, 2.5, 2, 1.5})));
  run.steps(1);
  CHECK(holds_the_weights(path, run.model));
  run.steps(1);
  CHECK(holds_the_weights(path, run.model));
  const std::string best = content_of(path);
  CHECK(contains(best, R"("step":"2")"));
  CHECK(contains(best, R"("validation_loss":"2")"));
  run.steps(3);
  CHECK(content_of(path) == best);
  CHECK_FALSE(holds_the_weights(path, run.model));
  run.steps(1);
  CHECK(holds_the_weights(path, run.model));
  CHECK_FALSE(std::filesystem::exists(path + ".new"));
}

TEST_CASE("what is measured at the end can be the best", "[session][validation]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(SaveBest(folder.path() + "/")).use(Validation(2, measured({3, 2})));
  run.steps(3);
  CHECK_FALSE(holds_the_weights(folder.path("model.safetensors"), run.model));
  run.session.finish();
  CHECK(holds_the_weights(folder.path("model.safetensors"), run.model));
}

TEST_CASE("the best value survives a resume", "[session][validation]") {
  const TemporaryFolder folder;
  const auto begin_run = [&](MetricsRun& run, std::vector<double> values) {
    run.session.use(Validation(1, measured(std::move(values))))
        .use(SaveBest(folder.path("best")))
        .use(Checkpoints(CheckpointsOptions(folder.path("checkpoints")).every(1)));
    const CapturedStderr quiet;
    run.session.resume();
  };
  {
    MetricsRun run;
    begin_run(run, {1.0, 2.0});
    run.steps(2);
  }
  const std::string best = content_of(folder.path("best/model.safetensors"));
  MetricsRun run;
  begin_run(run, {1.5, 0.5});
  run.steps(1);
  CHECK(content_of(folder.path("best/model.safetensors")) == best);
  run.steps(1);
  CHECK(holds_the_weights(folder.path("best/model.safetensors"), run.model));
}

TEST_CASE("a best model that cannot be written is a warning, and the next better one is tried",
          "[session][validation]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(SaveBest(folder.path("best"))).use(Validation(1, measured({3, 2, 2.5, 1})));
  run.steps(1);
  const std::string first = content_of(folder.path("best/model.safetensors"));
  std::filesystem::create_directory(folder.path("best/model.safetensors.new"));
  {
    const CapturedStderr captured;
    CHECK_NOTHROW(run.steps(1));
    CHECK(contains(captured.text(), "the best model so far (step 2) was not saved"));
    CHECK(contains(captured.text(), "model.safetensors.new"));
  }
  CHECK(content_of(folder.path("best/model.safetensors")) == first);
  std::filesystem::remove(folder.path("best/model.safetensors.new"));
  run.steps(1);  // 2.5 is better than 3, which is on the disk
  CHECK(holds_the_weights(folder.path("best/model.safetensors"), run.model));
}

TEST_CASE("ranks decide by the mean of their values, and fail together", "[session][validation][ranks]") {
  const TemporaryFolder folder;
  const Ranks worlds = Communicator::in_process(2);
  std::vector<int64_t> stopped_at(2);
  // By itself rank 0 would go on and rank 1 stop after the second value.
  const std::vector<std::vector<double>> values = {{4, 3, 2, 1}, {1, 2, 3, 4}};
  const auto messages = run_ranks(2, [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    torch::nn::Linear model(4, 1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer, worlds[own]);
    session.use(EarlyStopping(2)).use(SaveBest(folder.path())).use(Metrics(quiet_metrics(folder)));
    session.use(Validation(1, [&, next = measured(values[own])]() mutable {
      if (session.progress().step == 4 && rank == 1) throw std::runtime_error("no data");
      return next();
    }));
    const auto step = [&] {
      auto [x] = session.begin(torch::ones({2, 4}));
      session.backward(model->forward(x).square().mean());
      session.step();
    };
    while (!session.should_stop()) step();
    stopped_at[own] = session.progress().step;
    step();
  });
  CHECK(stopped_at == std::vector<int64_t>{3, 3});
  for (const std::string& message : messages) {
    CHECK(contains(message, "the function given to Validation failed on rank 1: no data"));
  }
  for (const MetricsJson& line : metrics_lines(folder)) CHECK(line["validation_loss"] == 2.5);
}

TEST_CASE("validation and what needs it refuse what cannot be, in words", "[session][validation]") {
  const auto nothing = [] { return 0.0; };
  CHECK(contains(refusal([&] { Validation(0, nothing); }), ">= 1"));
  CHECK(contains(refusal([&] { Validation(ValidationOptions(1).name(""), nothing); }), "name"));
  CHECK(contains(refusal([&] { Validation(1, nullptr); }), "function"));
  CHECK(contains(refusal([&] { EarlyStopping(0); }), "patience"));
  CHECK(contains(refusal([&] { EarlyStopping(EarlyStoppingOptions(1).min_delta(-1)); }), "min_delta"));
  CHECK(contains(refusal([&] { EarlyStopping(EarlyStoppingOptions(1).min_delta(kNan)); }), "min_delta"));
  CHECK(contains(refusal([&] { SaveBest(""); }), "folder"));
  const TemporaryFolder folder;
  MetricsRun early, best;
  early.session.use(EarlyStopping(1));
  CHECK(contains(refusal([&] { early.step(0); }), "pacer::Validation(every, function)"));
  best.session.use(SaveBest(folder.path()));
  CHECK(contains(refusal([&] { best.step(0); }), "pacer::Validation(every, function)"));
}

TEST_CASE("a Session prints on rank 0, with and without a bar", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun bare, measuring;
  measuring.session.use(Metrics(MetricsOptions(folder.path())));
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  std::FILE* const file = std::tmpfile();
  dup2(fileno(file), STDOUT_FILENO);
  bare.session.print("of 1 % or more");
  measuring.session.print("before the first step");
  measuring.step(0);
  measuring.session.print("after it");
  const Ranks worlds = Communicator::in_process(2);
  for (const auto& world : worlds) {
    torch::nn::Linear model(4, 1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session(*model, optimizer, world).print("rank " + std::to_string(world->rank()));
  }
  std::fflush(stdout);
  dup2(before, STDOUT_FILENO);
  close(before);
  std::string text(2000, '\0');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  CHECK(text.rfind("of 1 % or more\nbefore the first step\nstep 1", 0) == 0);
  CHECK(contains(text, "\nafter it\nrank 0\n"));
  CHECK_FALSE(contains(text, "rank 1"));
}

}  // namespace pacer::testing
