// What a run may not lose: files of an older run in the same folder, the last good checkpoint, the better
// model; and two runs that would write to one folder.
#include <cmath>
#include <filesystem>
#include <limits>

#include <torch/nn/modules/linear.h>

#include <pacer/files/checkpoint_folder.h>
#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/metrics/metrics_run.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing::lost_work {
namespace {

Checkpoints checkpoints_in(const std::string& folder) { return Checkpoints(CheckpointsOptions(folder)); }

Metrics quiet_metrics_in(const std::string& folder) {
  return Metrics(MetricsOptions(folder).progress(false));
}

std::function<double()> measured(std::vector<double> values) {
  return [values = std::move(values), next = size_t{0}]() mutable {
    return values[std::min(next++, values.size() - 1)];
  };
}

// A run of so many steps, from its start to finish().
void run(const std::function<void(Session&)>& use, int steps) {
  Trainer t;
  use(t.session);
  t.steps(steps);
  t.session.finish();
}

bool is_finite(const std::string& folder) {
  Trainer t;
  const CapturedStderr quiet;
  load_weights(*t.model, folder);
  return t.model->weight.isfinite().all().item<bool>();
}

std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(folder)) steps.push_back(info.step);
  return steps;
}

}  // namespace

TEST_CASE("a start that is refused leaves the files of the older run", "[mistakes][metrics]") {
  const TemporaryFolder folder;
  const auto use = [&](Session& session) {
    session.use(checkpoints_in(folder.path("c"))).use(quiet_metrics_in(folder.path()));
  };
  run(use, 3);
  const std::string jsonl = content_of(folder.path("metrics.jsonl"));
  const std::string csv = content_of(folder.path("metrics.csv"));
  REQUIRE(jsonl.size() > 100);
  CHECK(contains(heard_of([&] { run(use, 1); }), "has checkpoints of another run"));
  CHECK(content_of(folder.path("metrics.jsonl")) == jsonl);
  CHECK(content_of(folder.path("metrics.csv")) == csv);

  // A table that cannot be continued is found before any other file is cut.
  put_content(folder.path("metrics.csv"), "a,b\n1,2\n");
  const auto resumes = [&] {
    Trainer t;
    use(t.session);
    t.session.resume();
    t.steps(1);
  };
  put_content(folder.path("metrics.jsonl"), jsonl + "{\"step\":4,\"tokens\":16}\n");
  CHECK(contains(heard_of(resumes), "cannot continue"));
  CHECK(contains(content_of(folder.path("metrics.jsonl")), "\"step\":4"));
}

TEST_CASE("a better model of an older run stays until this one measures better", "[mistakes][validation]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("best/model.safetensors");
  const auto use = [&](std::vector<double> values) {
    return [&folder, values](Session& session) {
      session.use(SaveBest(folder.path("best"))).use(Validation(1, measured(values)));
    };
  };
  run(use({3, 0.5, 1}), 3);
  const std::string best = content_of(path);
  const std::string heard = heard_of([&] { run(use({2, 1}), 2); });
  CHECK(contains(heard, "validation_loss 0.5"));
  CHECK(contains(heard, "step 2"));
  CHECK(content_of(path) == best);
  run(use({2, 0.25}), 2);
  CHECK(contains(content_of(path), R"("validation_loss":"0.25")"));

  // A file that says no such value is somebody else's.
  save_weights(*torch::nn::Linear(3, 2), path);
  const std::string other = content_of(path);
  CHECK(contains(heard_of([&] { run(use({0.125}), 1); }), "choose another folder"));
  CHECK(content_of(path) == other);
}

TEST_CASE("the newest checkpoint with finite parameters stays, and a resume takes it", "[checkpoint]") {
  const TemporaryFolder folder;
  const auto use = [&](Session& session) {
    session.use(Checkpoints(CheckpointsOptions(folder.path("c")).every(2).keep(2)));
  };
  const auto steps = [](Trainer& t, int count, double factor) {
    for (int i = 0; i < count; ++i) {
      t.session.backward(t.forward() * factor);
      t.session.step();
    }
  };
  const std::string heard = heard_of([&] {
    Trainer t;
    use(t.session);
    steps(t, 4, 1);
    steps(t, 8, std::numeric_limits<double>::quiet_NaN());
    t.session.finish();
  });
  CHECK(contains(heard, "not finite"));
  CHECK(contains(heard, "step-0000000006"));
  CHECK(steps_in(folder.path("c")) == std::vector<int64_t>{12, 10, 4});
  CHECK(is_finite(folder.path("c/step-0000000004")));
  CHECK_FALSE(is_finite(folder.path("c/step-0000000012")));
  CHECK(is_finite(folder.path("c")));

  Trainer t;
  use(t.session);
  std::optional<int64_t> step;
  const std::string said = heard_of([&] { step = t.session.resume(); });
  CHECK(step == 4);
  CHECK(contains(said, "passed over the checkpoint"));
  CHECK(t.model->weight.isfinite().all().item<bool>());
  steps(t, 4, 1);
  t.session.finish();
  CHECK(is_finite(folder.path("c/step-0000000008")));
}

TEST_CASE("an empty or missing folder is told of where a run resumes", "[resume]") {
  const TemporaryFolder folder;
  Trainer t;
  t.session.use(checkpoints_in(folder.path("typo")));
  const std::string heard = heard_of([&] { CHECK(t.session.resume() == std::nullopt); });
  CHECK(fault_of(heard, {"no checkpoint", folder.path("typo"), "step 0"}) == "");
}

TEST_CASE("frozen weights that change are not left out of checkpoints", "[checkpoint]") {
  const TemporaryFolder folder;
  struct Net : torch::nn::Module {
    torch::nn::Linear student{register_module("student", torch::nn::Linear(3, 2))};
    torch::nn::Linear teacher{register_module("teacher", torch::nn::Linear(3, 2))};
  } net;
  net.teacher->weight.requires_grad_(false);
  net.teacher->bias.requires_grad_(false);
  FusedAdamW optimizer(net.student->parameters(), FusedAdamWOptions(0.1));
  Session session(net, optimizer);
  session.use(Checkpoints(CheckpointsOptions(folder.path("c")).save_frozen(false)));
  const auto steps = [&](int count) {
    for (int i = 0; i < count; ++i) {
      auto [x] = session.begin(torch::ones({4, 3}));
      session.backward((net.student(x) - net.teacher(x)).square().mean());
      session.step();
      const at::NoGradGuard no_grad;
      net.teacher->weight.lerp_(net.student->weight, 0.1);
    }
  };
  CHECK(fault_of(heard_of([&] { steps(5); }), {"teacher.weight", "save_frozen(false)"}) == "");
  CHECK(session.progress().step == 2);
}

TEST_CASE("what comes back to the same bits has not changed", "[checkpoint]") {
  const TemporaryFolder folder;
  Trainer t;
  t.model->bias.requires_grad_(false);
  t.session.use(Checkpoints(CheckpointsOptions(folder.path("c")).save_frozen(false).every(1)));
  t.steps(1);
  {
    const at::NoGradGuard no_grad;
    t.model->bias.add_(0);
  }
  t.steps(1);
  t.session.finish();
  Trainer other;
  {
    const at::NoGradGuard no_grad;
    other.model->bias.copy_(t.model->bias);
  }
  other.model->bias.requires_grad_(false);
  other.session.use(Checkpoints(CheckpointsOptions(folder.path("c")).save_frozen(false)));
  CHECK(other.session.resume() == 2);
}

TEST_CASE("two Sessions of a process do not share a folder", "[mistakes]") {
  const TemporaryFolder folder;
  const std::function<void(Session&)> all[] = {
      [&](Session& session) { session.use(checkpoints_in(folder.path("c"))); },
      [&](Session& session) { session.use(quiet_metrics_in(folder.path("m"))); },
      [&](Session& session) { session.use(SaveBest(folder.path("b"))).use(Validation(1, measured({1}))); }};
  for (const auto& use : all) {
    Trainer discriminator, generator;
    use(discriminator.session);
    use(generator.session);
    discriminator.steps(1);
    CHECK(fault_of(heard_of([&] { generator.steps(1); }),
                   {folder.path(), "another Session of this process", "folder of its own"}) == "");
    discriminator.steps(1);
    discriminator.session.finish();
  }
  // One after the other they may.
  Trainer first, second;
  first.session.use(quiet_metrics_in(folder.path("m")));
  first.steps(1);
  first.session.finish();
  second.session.use(quiet_metrics_in(folder.path("m")));
  second.steps(1);
  second.session.finish();
}

TEST_CASE("several ranks hear of a folder in use", "[mistakes][ranks]") {
  const TemporaryFolder folder;
  Trainer other;
  other.session.use(checkpoints_in(folder.path("c")));
  other.steps(1);
  const Ranks world = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    torch::nn::Linear model(3, 2);
    FusedAdamW optimizer(model->parameters());
    Session session(model, optimizer, world[static_cast<size_t>(rank)]);
    session.use(checkpoints_in(folder.path("c")));
    auto [x] = session.begin(torch::ones({4, 3}));
  });
  for (const std::string& message : messages) CHECK(contains(message, "another Session of this process"));
  other.session.finish();
}

TEST_CASE("TensorBoard hears where a resumed run begins", "[metrics]") {
  const TemporaryFolder folder;
  const auto events_of = [&](int64_t from) {
    Trainer t;
    t.session.use(MetricsSeam(metrics_progress(from)))
        .use(Metrics(MetricsOptions(folder.path()).progress(false).jsonl(false).csv(false)));
    t.steps(1);
    t.session.finish();
    std::string text;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      if (contains(entry.path().string(), "tfevents")) text = content_of(entry.path().string());
      std::filesystem::remove(entry.path());
    }
    return text;
  };
  // Event { step = 8; session_log { status = START } }: fields 2, and 7 with field 1.
  CHECK(contains(events_of(7), std::string("\x10\x08\x3a\x02\x08\x01", 6)));
}

}  // namespace pacer::testing::lost_work
