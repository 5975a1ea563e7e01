// What records of the Metrics hook say of floating-point operations, against the tokens per second beside them.
#include <cmath>

#include <pacer/metrics/detail/metrics_queue.h>

#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/metrics/metrics_run.h"

namespace pacer::testing {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("records say how many operations a second were done, and what share of the peak that is",
          "[session][metrics]") {
  const TemporaryFolder plain, counted, compared;
  metrics_run(quiet_metrics(plain), 0, 2);
  metrics_run(quiet_metrics(counted).operations_per_token(1000), 0, 2);
  metrics_run(quiet_metrics(compared).operations_per_token(1000).peak_operations(5e9), 0, 2);
  for (const MetricsJson& line : metrics_lines(plain)) {
    CHECK_FALSE(line.contains("operations_per_second"));
    CHECK_FALSE(line.contains("utilization"));
  }
  for (const MetricsJson& line : metrics_lines(counted)) {
    CHECK(line["operations_per_second"].get<double>() == 1000 * line["tokens_per_second"].get<double>());
    CHECK_FALSE(line.contains("utilization"));
  }
  for (const MetricsJson& line : metrics_lines(compared)) {
    const double wanted = line["tokens_per_second"].get<double>() / 5e6;
    CHECK(line["utilization"].get<double>() == Catch::Approx(wanted).epsilon(1e-12));
  }
  CHECK(metrics_lines(compared).size() == 2);
  check_csv_equals_jsonl(compared);
}

TEST_CASE("the peak is that of the devices of all ranks", "[session][metrics][ranks]") {
  const TemporaryFolder folder;
  const Ranks worlds = Communicator::in_process(2, {});
  std::vector<SmallModel> models = {small_model(), small_model()};
  CHECK(first_of(run_ranks(2, [&](int rank) {
          SmallModel& model = models[static_cast<size_t>(rank)];
          torch::optim::SGD optimizer(model->parameters(), 0.1);
          Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
          session.use(Metrics(quiet_metrics(folder).operations_per_token(1000).peak_operations(1e6)));
          const auto batch = small_batch(rank);
          auto [x, y] = session.begin(batch.first, batch.second);
          session.backward(model->loss(x, y));
          session.step();
          session.finish();
        })) == "");
  const MetricsJson line = metrics_lines(folder).at(0);
  CHECK(line["tokens"] == 64);
  CHECK(line["utilization"].get<double>() ==
        Catch::Approx(line["tokens_per_second"].get<double>() / 2000).epsilon(1e-12));
}

TEST_CASE("Metrics refuses operations that cannot be, and takes their names for its own",
          "[metrics][errors]") {
  const MetricsOptions options("run");
  const auto with = [&](const auto& change) {
    MetricsOptions changed = options;
    change(changed);
    return message_of([&] { Metrics{changed}; });
  };
  CHECK_THAT(with([](auto& o) { o.operations_per_token(0); }),
             ContainsSubstring("operations_per_token must be a number above 0, not 0"));
  CHECK_THAT(with([](auto& o) { o.operations_per_token(1).peak_operations(-2); }),
             ContainsSubstring("peak_operations must be a number above 0, not -2"));
  CHECK_THAT(with([](auto& o) { o.operations_per_token(INFINITY); }), ContainsSubstring("not inf"));
  CHECK_THAT(with([](auto& o) { o.peak_operations(1e12); }),
             ContainsSubstring("peak_operations is compared with operations_per_token; set that, too"));
  for (const char* name : {"operations_per_second", "utilization"}) {
    CHECK_THAT(message_of([&] { detail::MetricsQueue::require_free(name); }), ContainsSubstring(name));
  }
}

}  // namespace pacer::testing
