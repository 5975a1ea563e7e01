// Runs go seed by seed and, inside a seed, arm by arm, so that a machine that slows down slows all arms
// alike.
#include "study.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <torch/headeronly/version.h>

#include <pacer/core/error.h>
#include <pacer/core/json_lines.h>

#include "corpus.h"
#include "format.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "table.h"
#include "training.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

// Writes metrics.jsonl and moves the progress display.
class RunRecorder : public RunObserver {
 public:
  RunRecorder(const std::string& arm, uint64_t seed, int64_t tokens, const fs::path& folder)
      : progress_(arm + ", seed " + std::to_string(seed), tokens),
        metrics_((folder / "metrics.jsonl").string()) {}

  void on_training(const CurvePoint& point, double learning_rate) override {
    metrics_.write(line("training", point).add("learning_rate", learning_rate));
    progress_.on_training(point);
  }

  void on_validation(const CurvePoint& point) override {
    metrics_.write(line("validation", point));
    progress_.on_validation(point);
  }

  void finish(const Run& run) {
    metrics_.write(pacer::JsonLine()
                       .add("event", "end")
                       .add("tokens", run.validation.back().tokens)
                       .add("seconds", run.seconds)
                       .add("loss", run.validation.back().loss)
                       .add("step_seconds", run.step_seconds)
                       .add("optimizer_seconds", run.optimizer_seconds));
    progress_.finish(run);
  }

 private:
  static pacer::JsonLine line(const char* event, const CurvePoint& point) {
    pacer::JsonLine line;
    line.add("event", event)
        .add("tokens", point.tokens)
        .add("seconds", point.seconds)
        .add("loss", point.loss);
    return line;
  }

  Progress progress_;
  pacer::JsonLinesFile metrics_;
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

}  // namespace

void run_study(const Settings& settings) {
  const Corpus corpus = read_corpus(settings.data, settings.data_limit, settings.sequence);
  const fs::path output = make_folder(settings.output);
  const Machine machine = prepare_machine(settings);
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

  for (const uint64_t seed : settings.seeds) {
    for (const std::string& arm : settings.arms) {
      const fs::path folder = make_folder(output / (arm + "-seed-" + std::to_string(seed)));
      RunRecorder recorder(arm, seed, settings.steps() * settings.tokens_per_step(), folder);
      report.runs.push_back(train(arm, seed, settings, machine, corpus, &recorder));
      recorder.finish(report.runs.back());
      // After every run, so that a study that is cut short leaves what it has.
      report.settings = settings_as_ini(settings);
      write_file(output / "report.html", report_as_html(report));
    }
  }
  const auto summaries = summarize(report.runs);
  const std::string table = "\n" + as_text(summary_table(summaries)) + "\n" + table_note(summaries) + "\n";
  std::fputs(table.c_str(), stdout);
  std::printf("\nCurves: %s\n", (output / "report.html").c_str());
}

}  // namespace convergence
