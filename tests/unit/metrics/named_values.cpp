// Session::record: numbers of the loop's own in the records, against means that were computed beside the run.
#include <cmath>
#include <limits>

#include <pacer/hooks/gradient_clipping.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/session/validation.h>

#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/metrics/metrics_run.h"

namespace pacer::testing {
TEST_CASE("numbers of the loop's own are recorded as means since the record before", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(GradientClipping(1.0)).use(Metrics(quiet_metrics(folder).every(3)));
  run.session.record("before", 7);  // before training begins
  for (int64_t i = 0; i < 7; ++i) {
    const auto step = static_cast<double>(i);
    run.session.record("whole", torch::tensor(i));
    run.session.record("several", step);
    run.session.record("several", torch::tensor({step + 0.5}, torch::kHalf));
    if (i == 4) run.session.record("once", torch::tensor(0.25, torch::kBFloat16).view({1, 1, 1}));
    if (i == 5) run.session.record("bad", std::numeric_limits<double>::infinity());
    if (i >= 3) run.session.record("true", torch::tensor(i == 3));
    run.step(i);
  }
  run.session.finish();

  const auto lines = metrics_lines(folder);
  REQUIRE(metrics_steps(folder) == std::vector<int64_t>{3, 6, 7});  // the last one holds what came since
  CHECK(lines[0]["before"] == 7);
  CHECK(lines[0]["whole"] == 1);
  CHECK(lines[0]["several"] == 1.25);
  CHECK_FALSE(lines[0].contains("once"));
  CHECK_FALSE(lines[1].contains("before"));
  CHECK(lines[1]["whole"] == 4);
  CHECK(lines[1]["several"] == 4.25);
  CHECK(lines[1]["once"] == 0.25);
  CHECK(lines[1]["bad"] == "inf");
  CHECK(lines[1]["true"] == 1 / 3.0);
  CHECK(lines[2]["whole"] == 6);
  CHECK(lines[2]["several"] == 6.25);
  CHECK_FALSE(lines[2].contains("loss"));
  check_csv_equals_jsonl(folder);
}

TEST_CASE("a number is recorded as it was, and keeps no graph", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(Metrics(quiet_metrics(folder)));
  Tensor value = torch::tensor(2.0), weight = torch::ones({}).requires_grad_();
  run.session.record("value", value);
  value.fill_(5);
  Tensor product = weight * 3;
  const c10::weak_intrusive_ptr<c10::TensorImpl> graph(product.getIntrusivePtr());
  run.session.record("product", product);
  product.reset();
  CHECK(graph.expired());
  run.step(0);
  CHECK(metrics_lines(folder).at(0)["value"] == 2);
  CHECK(metrics_lines(folder).at(0)["product"] == 3);
  CHECK_FALSE(weight.grad().defined());
}

TEST_CASE("what cannot be recorded is refused, and nothing of it is kept", "[session][metrics]") {
  const Tensor one = torch::ones({});
  MetricsRun without;
  CHECK(contains(refusal([&] { without.session.record("mine", one); }), "needs the Metrics hook"));

  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(LearningRate(warmup_cosine({4, 100}))).use(Metrics(quiet_metrics(folder)));
  for (const char* name : {"step", "tokens", "loss", "gradient_norm", "loss_scale", "skipped_steps",
                           "seconds_per_step", "tokens_per_second"}) {
    CHECK(contains(refusal([&] { run.session.record(name, one); }), name));
  }
  CHECK(contains(refusal([&] { run.session.record("", one); }), "without a name"));
  for (const Tensor& value : {Tensor(), torch::ones({2}), torch::ones({0}),
                              torch::ones({}, torch::kComplexFloat), torch::ones({1}).to_sparse()}) {
    CHECK(contains(refusal([&] { run.session.record("mine", value); }), "\"mine\") takes one real number"));
  }
  run.step(0);
  CHECK_FALSE(metrics_lines(folder).at(0).contains("mine"));

  // The numbers of hooks are known when a step reports them.
  run.session.record("learning_rate", one);
  CHECK(contains(refusal([&] { run.step(1); }), "learning_rate"));
  run.step(2);
  CHECK(metrics_lines(folder).back()["learning_rate"].get<double>() < 1);
}

TEST_CASE("numbers that come behind the last step are recorded by finish", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  int measured = 0;
  run.session.use(Validation(ValidationOptions(100), [&] { return 1.0 + measured++; }))
      .use(Metrics(quiet_metrics(folder)));
  run.steps(2);
  run.session.record("test_accuracy", 0.75);
  run.session.finish();
  const auto lines = metrics_lines(folder);
  REQUIRE(metrics_steps(folder) == std::vector<int64_t>{1, 2, 2});
  CHECK(lines[2]["test_accuracy"] == 0.75);
  CHECK(lines[2].contains("validation_loss"));
}

TEST_CASE("with several ranks the first one's numbers are recorded", "[session][metrics][ranks]") {
  const TemporaryFolder folder;
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    SmallModel model = small_model();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(DataParallel()).use(Metrics(quiet_metrics(folder)));
    for (int64_t i = 0; i < 2; ++i) {
      auto [x, y] = session.begin(small_batch(i).first, small_batch(i).second);
      session.backward(model->loss(x, y));
      session.record("rank", 10 + rank);
      if (rank == 1) session.record("of the second", 1);
      session.step();
    }
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  for (const auto& line : metrics_lines(folder)) {
    CHECK(line["rank"] == 10);
    CHECK_FALSE(line.contains("of the second"));
  }
}

}  // namespace pacer::testing
