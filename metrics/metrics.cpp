#include <pacer/metrics/metrics.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/files/file_system.h>
#include <pacer/files/folder_lock.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>
#include <pacer/metrics/detail/loss_mean.h>
#include <pacer/metrics/detail/metrics_files.h>
#include <pacer/metrics/detail/metrics_queue.h>
#include <pacer/metrics/detail/named_means.h>
#include <pacer/metrics/progress_bar.h>

namespace pacer {
namespace {

using MetricsClock = std::chrono::steady_clock;

// With the folders above it, where they are missing.
void make_metrics_folders(const std::string& folder) {
  FileSystem& files = posix_file_system();
  for (size_t end = 0; end != std::string::npos;) {
    end = folder.find('/', end + 1);
    make_folder(files, folder.substr(0, end));
  }
  require<FileError>(folder_exists(files, folder + "/."), "the folder ", folder, " vanished");
  const bool writable = ::access(folder.c_str(), W_OK | X_OK) == 0;
  require<FileError>(writable, "cannot write metrics to the folder ", folder, ": ", std::strerror(errno));
}

ProgressPoint progress_point(const detail::MetricsRecord& record, const std::string& validation) {
  ProgressPoint point;
  point.step = record.step;
  point.tokens = record.tokens;
  point.loss = record.find("loss");
  point.learning_rate = record.find("learning_rate");
  point.tokens_per_second = record.find("tokens_per_second");
  point.gradient_norm = record.find("gradient_norm");
  point.validation = record.find(validation);
  return point;
}

}  // namespace

struct Metrics::State {
  detail::MetricsQueue queue;
  std::optional<detail::MetricsFiles> files;  // from start() on, when it is known where this run begins
  std::optional<ProgressBar> bar;             // from the first step on
  detail::LossMean loss;
  detail::NamedMeans recorded;  // by Session::record, since the last record
  // Of the last record, or of the start.
  std::optional<MetricsClock::time_point> time;
  Progress progress;
  int64_t validated_at = -1;  // the step of the validation that was recorded last
};

Metrics::Metrics(MetricsOptions options) : options_(std::move(options)) {
  require(!options_.folder().empty(), "Metrics needs the name of a folder; it is empty");
  const auto require_positive = [](const char* option, std::optional<int64_t> value) {
    require(value.value_or(1) >= 1, "Metrics: ", option, " must be at least 1, not ", value.value_or(1));
  };
  require_positive("every", options_.every());
  require_positive("total_steps", options_.total_steps());
  require_positive("total_tokens", options_.total_tokens());
  const auto require_operations = [](const char* option, std::optional<double> value) {
    require(!value || (*value > 0 && std::isfinite(*value)), "Metrics: ", option,
            " must be a number above 0, not ", value.value_or(0));
  };
  require_operations("operations_per_token", options_.operations_per_token());
  require_operations("peak_operations", options_.peak_operations());
  require(!options_.peak_operations() || options_.operations_per_token(),
          "Metrics: peak_operations is compared with operations_per_token; set that, too");
}
Metrics::Metrics(Metrics&& other) noexcept = default;

Metrics::~Metrics() {
  try {
    if (state_ && state_->files) write_arrived(/*wait=*/false);
  } catch (const std::exception&) {  // a destructor cannot report it; finish() does
  }
}

void Metrics::attach(SessionParts& parts) {
  parts_ = &parts;
  parts.record_loss = true;  // on all ranks, which average it
  if (!parts.is_first_rank()) return;
  make_metrics_folders(options_.folder());
  state_ = std::make_unique<State>();
}

void Metrics::start(const Progress& progress) {
  detail::on_all_ranks_or_none(parts_->world(), std::chrono::minutes(30), "start training",
                               [&]() -> std::string {
                                 if (!state_) return "";
                                 detail::MetricsFiles::check(options_, progress.step);
                                 if (!lock_)
                                   lock_ = std::make_unique<FolderLock>(
                                       options_.folder(), "metrics", FolderLock::resuming(progress.step > 0));
                                 return "";
                               });
}

void Metrics::open(const Progress& progress) {
  if (!state_) return;
  state_->files.emplace(options_, progress.step);
  state_->progress = progress;
  state_->validated_at = parts_->validation.step;
}

void Metrics::begin(const Progress& /*progress*/, MicroBatch& /*batch*/) {
  if (state_ && !state_->time) state_->time = MetricsClock::now();
}

void Metrics::after_step(StepReport& report) {
  if (!state_) return;
  if (lock_) lock_->check();
  State& state = *state_;
  const Progress& progress = report.progress();
  if (options_.progress() && !state.bar) {
    state.bar.emplace(options_.total_steps().value_or(0), options_.total_tokens().value_or(0));
    state.bar->begin(state.progress.step, state.progress.tokens);
  }
  state.loss.add(report);
  state.validated_at = parts_->validation.step;
  if (progress.step % options_.every() == 0 || report.record_is_requested()) {
    const auto now = MetricsClock::now();
    const double seconds = std::max(std::chrono::duration<double>(now - *state.time).count(), 1e-9);
    StepReport record = report;
    state.loss.move_to(record);
    state.recorded.move_to(record);
    const auto steps = static_cast<double>(progress.step - state.progress.step);
    const auto tokens = static_cast<double>(progress.tokens - state.progress.tokens);
    detail::MetricsQueue::Speed speed{seconds / steps, tokens / seconds, {}, {}};
    if (options_.operations_per_token()) {
      speed.operations_per_second = speed.tokens_per_second * *options_.operations_per_token();
    }
    if (options_.peak_operations()) {
      const auto ranks = static_cast<double>(parts_->world().world_size());
      speed.utilization = *speed.operations_per_second / (ranks * *options_.peak_operations());
    }
    state.queue.push(record, speed);
    state.time = now;
    state.progress = progress;
  }
  write_arrived(/*wait=*/false);
}

void Metrics::finish(const Progress& progress) {
  if (!state_) return;
  if (!state_->files) return;
  // What was measured after the last step, which has its record already.
  const ValidationResult& validation = parts_->validation;
  StepReport last(progress);
  if (validation.step == progress.step && validation.step != state_->validated_at) {
    last.add(validation.name, validation.value);
    state_->validated_at = validation.step;
  }
  state_->recorded.move_to(last);
  if (!last.numbers().empty() || !last.late_numbers().empty()) state_->queue.push(last, std::nullopt);
  write_arrived(/*wait=*/true);
  if (state_->bar) state_->bar->finish();
  if (const auto sentence = state_->files->final_warning()) warn(*sentence);
  lock_.reset();
}

void Metrics::warn(const std::string& sentence) {
  if (state_->bar) state_->bar->interrupt();
  TORCH_WARN(sentence);
}

bool Metrics::print(const std::string& line) {
  if (!state_) return false;
  if (state_->bar) {
    state_->bar->print(line);
  } else {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  return true;
}

bool Metrics::record(const std::string& name, const at::Tensor& value) {
  detail::MetricsQueue::require_free(name);
  if (state_) state_->recorded.add(name, value);
  return true;
}

void Metrics::write_arrived(bool wait) {
  bool wrote = false;
  while (const auto record = state_->queue.pop(wait)) {
    if (state_->bar) state_->bar->show(progress_point(*record, parts_->validation.name));
    if (const auto sentence = state_->files->write(*record)) warn(*sentence);
    wrote = true;
  }
  if (!wrote) return;
  if (const auto sentence = state_->files->flush()) warn(*sentence);
}

}  // namespace pacer
