// The files of the Metrics hook over interruptions, with keys that come and go, and where they cannot be
// written.
#include <csignal>
#include <filesystem>

#include <sys/resource.h>

#include <pacer/core/error.h>

#include "support/metrics_run.h"

namespace pacer::testing {
namespace {

template <class Action>
std::string metrics_file_error(Action action) {
  try {
    action();
  } catch (const FileError& error) {
    return error.what();
  }
  return "<no FileError>";
}

}  // namespace

TEST_CASE("a resumed run records no step twice and leaves none out", "[session][metrics]") {
  const TemporaryFolder folder;
  const auto options = quiet_metrics(folder);
  metrics_run(options, 0, 6);
  const std::string jsonl = content_of(folder.path("metrics.jsonl"));
  const std::string csv = content_of(folder.path("metrics.csv"));
  // Killed while it wrote step 7; a checkpoint was made after step 4. And half a record with the next behind
  // it, as a disk leaves it that was full for a while.
  const std::string record = R"({"step":3,"tokens":96,"loss":1.5)";
  put_content(folder.path("metrics.jsonl"), jsonl + record + "1}{\"step\":4}\n" + "\n" + record);
  put_content(folder.path("metrics.csv"), csv + "3,96\n\n" + "3,96,1.5,0");
  put_content(folder.path("metrics.csv.new"), "of a run that was killed while it replaced the file");
  metrics_run(options, 4, 3);
  CHECK(metrics_steps(folder) == metrics_range(1, 7));
  check_csv_equals_jsonl(folder);
  const auto begins_with = [](const std::string& text, const std::string& begin, int64_t lines) {
    size_t end = 0;
    for (int64_t i = 0; i < lines; ++i) end = begin.find('\n', end) + 1;
    return text.substr(0, end) == begin.substr(0, end);
  };
  CHECK(begins_with(content_of(folder.path("metrics.jsonl")), jsonl, 4));
  CHECK(begins_with(content_of(folder.path("metrics.csv")), csv, 5));
  CHECK(metrics_lines(folder)[6]["tokens"] == 7 * 32);
  CHECK_FALSE(std::filesystem::exists(folder.path("metrics.csv.new")));

  SECTION("also where there is nothing left to remove") {
    metrics_run(options, 7, 2);
    CHECK(metrics_steps(folder) == metrics_range(1, 9));
    check_csv_equals_jsonl(folder);
  }
  SECTION("a run from the start empties the files") {
    metrics_run(options, 0, 2);
    CHECK(metrics_steps(folder) == metrics_range(1, 2));
    check_csv_equals_jsonl(folder);
  }
  SECTION("files that were cut in their first line, or are missing, are begun anew") {
    put_content(folder.path("metrics.jsonl"), R"({"step")");
    put_content(folder.path("metrics.csv"), "step,tok");
    metrics_run(options, 7, 2);
    CHECK(metrics_steps(folder) == metrics_range(8, 9));
    check_csv_equals_jsonl(folder);
    std::filesystem::remove(folder.path("metrics.jsonl"));
    std::filesystem::remove(folder.path("metrics.csv"));
    metrics_run(options, 9, 1);
    CHECK(metrics_steps(folder) == metrics_range(10, 10));
    check_csv_equals_jsonl(folder);
  }
  SECTION("a file of somebody else stays as it is") {
    put_content(folder.path("metrics.csv"), "time,loss\n3,4\n");
    CHECK(contains(metrics_file_error([&] { metrics_run(options, 7, 1); }), "metrics.csv"));
    CHECK(content_of(folder.path("metrics.csv")) == "time,loss\n3,4\n");
  }
}

TEST_CASE("a key that comes later gets a column, with empty cells above", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(Metrics(quiet_metrics(folder))).use(std::make_shared<MetricsSeam>([](StepReport& report) {
    const int64_t step = report.progress().step;
    if (step != 4) report.add("a \"quoted\" name", static_cast<double>(step) / 8);
    if (step >= 3) report.add("late", -1.0 / static_cast<double>(step));
  }));
  run.steps(5);
  run.session.finish();
  auto rows = metrics_rows(folder);
  REQUIRE(rows.size() == 6);
  CHECK(rows[0][3] == R"("a ""quoted"" name")");
  CHECK(rows[0].back() == "late");
  for (const auto& row : rows) CHECK(row.size() == 7);
  for (size_t step = 1; step <= 5; ++step) {
    CHECK(rows[step][0] == std::to_string(step));
    CHECK(rows[step].back().empty() == (step < 3));
    CHECK(rows[step][3].empty() == (step == 4));
  }
  CHECK(std::strtod(rows[5].back().c_str(), nullptr) == -1.0 / 5);

  const auto header = rows[0];
  metrics_run(quiet_metrics(folder), 4, 2);  // without these numbers, in the columns of the run before
  rows = metrics_rows(folder);
  REQUIRE(rows.size() == 7);
  CHECK(rows[0] == header);
  CHECK(rows[6].back().empty());
  CHECK_FALSE(rows[4].back().empty());
}

TEST_CASE("each file can be left out, and the folder is created", "[session][metrics]") {
  const TemporaryFolder folder;
  for (int which = 0; which < 3; ++which) {
    CAPTURE(which);
    const std::string path = folder.path("deep/er/" + std::to_string(which) + "/");
    metrics_run(
        MetricsOptions(path).progress(false).jsonl(which == 0).csv(which == 1).tensorboard(which == 2), 0, 2);
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      names.push_back(entry.path().filename().string());
    }
    REQUIRE(names.size() == 1);
    CHECK(names[0].rfind(which == 0   ? "metrics.jsonl"
                         : which == 1 ? "metrics.csv"
                                      : "events.out.tfevents.",
                         0) == 0);
    if (which == 2) {
      const std::string events = content_of(path + names[0]);
      for (const char* tag : {"loss", "tokens", "seconds_per_step", "tokens_per_second"}) {
        CHECK(contains(events, tag));
      }
    }
  }
}

TEST_CASE("files that cannot be written are a FileError with their path", "[session][metrics]") {
  const TemporaryFolder folder;
  put_content(folder.path("file"), "");
  for (const char* name : {"file", "file/below"}) {
    MetricsRun run;
    CHECK(contains(metrics_file_error([&] { run.session.use(Metrics(folder.path(name))); }), name));
    run.step(0);  // as if nobody had asked for metrics
  }
  if (!std::filesystem::exists("/dev/full")) return;
  for (const char* name : {"metrics.jsonl", "metrics.csv"}) {
    CAPTURE(name);
    const TemporaryFolder full;
    std::filesystem::create_symlink("/dev/full", full.path(name));
    MetricsRun run;
    run.session.use(Metrics(quiet_metrics(full)));
    CHECK(contains(metrics_file_error([&] { run.step(0); }), name));
    CHECK(run.session.progress().step == 1);  // the step itself was taken
    CHECK(contains(metrics_file_error([&] { run.step(1); }), name));
  }
}

TEST_CASE("what a full disk cut short is removed when training goes on", "[session][metrics]") {
  // A disk that is full for one step, a few bytes into its record.
  class FullDisk {
   public:
    explicit FullDisk(const std::string& path) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
      getrlimit(RLIMIT_FSIZE, &before_);
      rlimit limit = before_;
      limit.rlim_cur = std::filesystem::file_size(path) + 5;
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FullDisk() {
      setrlimit(RLIMIT_FSIZE, &before_);
      std::signal(SIGXFSZ, handler_);
    }

   private:
    void (*handler_)(int);
    rlimit before_{};
  };
  for (const bool jsonl : {true, false}) {
    CAPTURE(jsonl);
    const TemporaryFolder folder;
    const std::string path = folder.path(jsonl ? "metrics.jsonl" : "metrics.csv");
    MetricsRun run;
    run.session.use(Metrics(quiet_metrics(folder).jsonl(jsonl).csv(!jsonl).tensorboard(false)));
    run.steps(2);
    std::string error;
    {
      const FullDisk full(path);
      error = metrics_file_error([&] { run.step(2); });
    }
    CHECK(contains(error, path));
    CHECK(content_of(path).back() != '\n');
    run.steps(2);
    run.session.finish();
    const std::vector<int64_t> expected = {1, 2, 4, 5};
    if (jsonl) {
      CHECK(metrics_steps(folder) == expected);
    } else {
      const auto rows = metrics_rows(folder);
      REQUIRE(rows.size() == 5);
      for (size_t i = 0; i < 4; ++i) {
        CHECK(rows[i + 1][0] == std::to_string(expected[i]));
        CHECK(rows[i + 1].size() == rows[0].size());
      }
    }
  }
}

}  // namespace pacer::testing
