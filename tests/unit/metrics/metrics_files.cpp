// The files of the Metrics hook over interruptions, with keys that come and go, and where they cannot be
// written.
#include <csignal>
#include <filesystem>

#include <sys/resource.h>
#include <unistd.h>

#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/metrics/detail/metrics_files.h>

#include "support/captured_stderr.h"
#include "support/collectives/ranks.h"
#include "support/metrics/metrics_run.h"

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

int lines_with(const std::string& text, const std::string& part) {
  int count = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) count += contains(line, part) ? 1 : 0;
  return count;
}

// Takes what is written to stderr while it lives into a string; through a pipe, which no limit of file sizes
// cuts short.
class Reported {
 public:
  explicit Reported(std::string& text) : text_(text), before_(dup(STDERR_FILENO)) {
    REQUIRE(pipe(ends_) == 0);
    std::fflush(stderr);
    dup2(ends_[1], STDERR_FILENO);
    close(ends_[1]);
  }
  ~Reported() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
    text_.resize(8192);
    const ssize_t count = read(ends_[0], text_.data(), text_.size());
    text_.resize(count < 0 ? 0 : static_cast<size_t>(count));
    close(ends_[0]);
  }
  Reported(const Reported&) = delete;

 private:
  std::string& text_;
  int before_;
  int ends_[2] = {-1, -1};
};

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
}

TEST_CASE("a full disk ends neither training nor checkpoints, and is told of", "[session][metrics]") {
  if (!std::filesystem::exists("/dev/full")) PACER_SKIP("no /dev/full");
  for (const char* name : {"metrics.jsonl", "metrics.csv"}) {
    CAPTURE(name);
    const TemporaryFolder full, checkpoints;
    std::filesystem::create_symlink("/dev/full", full.path(name));
    MetricsRun run;
    run.session.use(Metrics(quiet_metrics(full).every(2)))
        .use(Checkpoints(CheckpointsOptions(checkpoints.path()).every(1).synchronous(true)));
    {
      const CapturedStderr quiet;
      CHECK_NOTHROW(run.steps(1));
      CHECK(quiet.text().empty());
      CHECK_NOTHROW(run.steps(4));
      CHECK(lines_with(quiet.text(), "metrics: cannot write to " + full.path(name) + ": No space left") == 1);
    }
    CHECK(list_checkpoints(checkpoints.path()).front().step == 5);
    const CapturedStderr quiet;
    CHECK_NOTHROW(run.session.finish());
    CHECK(lines_with(quiet.text(),
                     "2 of this run's 2 records were lost (cannot write to " + full.path(name)) == 1);
  }
}

TEST_CASE("ranks stay in step where the first one has a full disk for metrics", "[session][metrics][ranks]") {
  if (!std::filesystem::exists("/dev/full")) PACER_SKIP("no /dev/full");
  const TemporaryFolder full, checkpoints;
  std::filesystem::create_symlink("/dev/full", full.path("metrics.jsonl"));
  const Ranks worlds = Communicator::in_process(2);
  const CapturedStderr quiet;
  const auto messages = run_ranks(2, [&](int rank) {
    torch::nn::Linear model(4, 1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(Metrics(quiet_metrics(full)))
        .use(Checkpoints(CheckpointsOptions(checkpoints.path()).every(1)));
    for (int step = 0; step < 3; ++step) {
      auto [x] = session.begin(torch::ones({2, 4}));
      session.backward(model->forward(x).square().mean());
      session.step();
    }
    session.finish();
  });
  CHECK(first_of(messages) == "");
  CHECK(list_checkpoints(checkpoints.path()).front().step == 3);
}

namespace {

// A disk that is full while this lives, a few bytes into the next record.
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

}  // namespace

TEST_CASE("what a full disk cut short is removed when training goes on", "[session][metrics]") {
  for (const bool jsonl : {true, false}) {
    CAPTURE(jsonl);
    const TemporaryFolder folder;
    const std::string path = folder.path(jsonl ? "metrics.jsonl" : "metrics.csv");
    MetricsRun run;
    run.session.use(Metrics(quiet_metrics(folder).jsonl(jsonl).csv(!jsonl).tensorboard(false)));
    run.steps(2);
    std::string warning;
    {
      const Reported reported(warning);
      const FullDisk full(path);
      run.step(2);
    }
    CHECK(contains(warning, path));
    CHECK(content_of(path).back() != '\n');
    run.steps(2);
    {
      const Reported reported(warning);
      run.session.finish();
    }
    CHECK(contains(warning, "1 of this run's 5 records were lost"));
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

TEST_CASE("curves that wait for a full disk are written later, and not missed then", "[session][metrics]") {
  const TemporaryFolder folder;
  detail::MetricsFiles files(quiet_metrics(folder).jsonl(false).csv(false), /*step=*/0);
  CHECK_FALSE(files.flush());
  CHECK_FALSE(files.write({1, 32, {{"loss", 0.5}}}));
  std::string events;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (contains(entry.path().string(), "tfevents")) events = entry.path().string();
  }
  REQUIRE_FALSE(events.empty());
  std::optional<std::string> warning, complaint;
  {
    const FullDisk full(events);
    warning = files.flush();
    complaint = files.final_warning();
  }
  CHECK(contains(warning.value_or(""), "curves wait in memory"));
  CHECK(contains(complaint.value_or(""), "curves lack their end"));
  CHECK_FALSE(files.flush());
  CHECK_FALSE(files.final_warning());
}

TEST_CASE("a disk that stays full is tried less and less often", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(Metrics(quiet_metrics(folder).csv(false).tensorboard(false)));
  run.steps(2);
  std::string warning;
  {
    const Reported reported(warning);
    const FullDisk full(folder.path("metrics.jsonl"));
    run.steps(5);  // tried after steps 3, 4 and 6; three more are dropped then
  }
  CHECK(lines_with(warning, "metrics: ") == 1);
  run.steps(5);
  {
    const Reported reported(warning);
    run.session.finish();
  }
  CHECK(metrics_steps(folder) == std::vector<int64_t>{1, 2, 10, 11, 12});
  CHECK(contains(warning, "7 of this run's 12 records were lost"));
}

}  // namespace pacer::testing
