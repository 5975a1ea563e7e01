// Runs go seed by seed and, inside a seed, arm by arm, so that a machine that slows down slows all arms
// alike.
#include "study.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

#include <torch/headeronly/version.h>

#include <pacer/core/error.h>

#include "corpus.h"
#include "format.h"
#include "guidance.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "run_file.h"
#include "table.h"
#include "training.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

// Writes metrics.jsonl and moves the progress display.
class RunRecorder : public RunObserver {
 public:
  RunRecorder(const std::string& name, int64_t tokens, const fs::path& folder)
      : progress_(name, tokens), file_(folder) {}

  void on_training(const TrainingPoint& point) override {
    file_.write_training(point);
    progress_.on_training(point);
  }

  void on_validation(const CurvePoint& point) override {
    file_.write_validation(point);
    progress_.on_validation(point);
  }

  void finish(const Run& run) {
    file_.write_end(run);
    progress_.finish(run);
  }

 private:
  Progress progress_;
  RunFile file_;
};

fs::path make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  pacer::require(fs::is_directory(folder), "cannot create the output folder ", folder.string(), ": ",
                 error ? error.message() : "it is not a folder");
  return folder;
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  pacer::require<pacer::FileError>(file.good(), "cannot write ", path.string());
}

std::string version_line() { return "LibTorch " TORCH_VERSION ", compiler " __VERSION__; }

std::string count_of(size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// All ranks in the same order.
template <class F>
void for_each_run(const Settings& settings, const F& f) {
  for (const uint64_t seed : settings.seeds) {
    for (const std::string& arm : settings.arms) f(arm, seed);
  }
}

fs::path run_folder(const Settings& settings, const std::string& arm, uint64_t seed) {
  return fs::path(settings.output) / (arm + "-seed-" + std::to_string(seed));
}

// Ranks look at one folder, each at its own time: what they read there must not have been changed by then.
void require_same_view(const fs::path& folder, bool stored, const Run& run, pacer::Communicator& world) {
  const std::string view = std::to_string(int{stored} + int{run.finished}) + " " +
                           std::to_string(run.training.size()) + " " + std::to_string(run.validation.size());
  for (const std::string& other : world.exchange(view)) {
    pacer::require(other == view, "the ranks do not see the same files in ", folder.string(),
                   "; --output must be a folder that all of them share");
  }
}

// Before anything is written: no run that was made with other settings is resumed.
void check_stored_runs(const Settings& settings) {
  for_each_run(settings, [&](const std::string& arm, uint64_t seed) {
    const fs::path folder = run_folder(settings, arm, seed);
    if (settings.resume && fs::exists(folder / "settings.ini")) require_same_settings(folder, settings);
  });
}

// The run of one arm and seed: from its folder, continued, or trained anew.
Run make_run(const std::string& arm, uint64_t seed, const Settings& settings, const Machine& machine,
             const Corpus& corpus) {
  const std::string name = arm + ", seed " + std::to_string(seed);
  const fs::path folder = run_folder(settings, arm, seed);
  pacer::Communicator& world = *machine.world;
  Run stored;
  const bool is_stored = settings.resume && fs::exists(folder / "settings.ini");
  if (is_stored) stored = read_run(folder, arm, seed);
  stored.processes = settings.processes;
  require_same_view(folder, is_stored, stored, world);
  if (stored.finished) {
    if (world.rank() == 0) Progress(name + ", finished before", settings.tokens).finish(stored);
    return stored;
  }
  std::optional<RunRecorder> recorder;  // on rank 0
  if (world.rank() == 0) {
    make_folder(folder);
    if (!is_stored) {
      fs::remove_all(folder / "checkpoints");  // of another study
      fs::remove(folder / "metrics.jsonl");
    }
    write_file(folder / "settings.ini", settings_as_ini(settings));
    recorder.emplace(name, settings.tokens, folder);
  }
  world.barrier();
  RunObserver nobody;
  RunObserver* const observer = recorder ? &*recorder : &nobody;
  const Run run = train(arm, seed, settings, machine, corpus, folder, stored, observer);
  if (recorder) recorder->finish(run);
  return run;
}

}  // namespace

void check_study(const Settings& settings) {
  check_stored_runs(settings);
  read_corpus(settings.data, settings.data_limit, settings.sequence);
}

void run_study(const Settings& settings) {
  check_stored_runs(settings);
  const Corpus corpus = read_corpus(settings.data, settings.data_limit, settings.sequence);
  const Machine machine = prepare_machine(settings);
  if (machine.world->rank() != 0) {
    for_each_run(settings, [&](const std::string& arm, uint64_t seed) {
      make_run(arm, seed, settings, machine, corpus);
    });
    return;
  }
  const fs::path output = make_folder(settings.output);
  StudyReport report;
  report.headline = count_of(settings.arms.size(), "arm") + ", " + count_of(settings.seeds.size(), "seed") +
                    ", " + short_count(static_cast<double>(settings.tokens)) + " tokens per run";
  report.facts = {{"Text", corpus.description},
                  {"Model", "byte-level GPT, " + std::to_string(settings.layers) + " layers of width " +
                                std::to_string(settings.width) + ", " +
                                short_count(static_cast<double>(count_parameters(settings))) + " parameters"},
                  {"Machine", machine.description + ", " + settings.precision},
                  {"Versions", version_line()}};
  for (const auto& [name, value] : report.facts) std::printf("%-9s %s\n", name.c_str(), value.c_str());
  std::printf("\n");
  write_file(output / "settings.ini", settings_as_ini(settings));

  for_each_run(settings, [&](const std::string& arm, uint64_t seed) {
    report.runs.push_back(make_run(arm, seed, settings, machine, corpus));
    // After every run, so that a study that is cut short leaves what it has.
    report.settings = settings_as_ini(settings);
    write_file(output / "report.html", report_as_html(report));
  });
  const auto summaries = summarize(report.runs);
  const Table traffic = traffic_table(summaries);
  const std::string table = "\n" + as_text(summary_table(summaries)) + "\n" +
                            (traffic.rows.empty() ? "" : as_text(traffic) + "\n") + table_note(summaries) +
                            "\n\n" + what_to_look_at(settings.arms, settings.processes);
  std::fputs(table.c_str(), stdout);
  std::printf("\nCurves: %s\n", (output / "report.html").c_str());
}

}  // namespace convergence
