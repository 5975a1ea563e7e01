// Runs go seed by seed and, inside a seed, arm by arm, so that a machine that slows down slows all arms
// alike.
#include "study.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>

#include <torch/headeronly/version.h>

#include <pacer/core/error.h>
#include <pacer/metrics/progress_bar.h>

#include "arms/fine_tuning.h"
#include "format.h"
#include "options.h"
#include "report/guidance.h"
#include "report/report.h"
#include "report/table.h"
#include "support/whole_file.h"
#include "text/corpus.h"
#include "training/run_file.h"
#include "training/training.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

std::string name_of(const RunPlan& plan) { return plan.name() + ", seed " + std::to_string(plan.seed); }

void print_result(const std::string& name, const Run& run) {
  std::printf("%s  validation %s after %s tokens in %s\n", name.c_str(),
              fixed_text(run.validation.back().value, 4).c_str(),
              with_thousands(run.validation.back().tokens).c_str(), duration_text(run.seconds()).c_str());
  std::fflush(stdout);
}

// Writes metrics.jsonl and shows how the run goes.
class RunRecorder : public RunObserver {
 public:
  // `place`: "arm 2 of 6".
  RunRecorder(const RunPlan& plan, const std::string& place, const Run& stored)
      : bar_(/*total_steps=*/0, plan.settings.tokens), file_(plan.folder) {
    std::printf("%s: %s\n", place.c_str(), name_of(plan).c_str());
    if (!stored.training.empty()) bar_.begin(stored.training.back().step, stored.training.back().tokens);
  }

  void on_training(const TrainingPoint& point) override {
    file_.write_training(point);
    shown_ = {point.step,
              point.tokens,
              point.loss,
              point.learning_rate,
              static_cast<double>(point.tokens) / std::max(point.seconds, 1e-9),
              {},
              {}};
    // Elsewhere every point would be a line.
    if (isatty(STDOUT_FILENO) != 0) bar_.show(shown_);
  }

  void on_validation(const CurvePoint& point) override {
    file_.write_validation(point);
    shown_.validation = point.value;
    bar_.show(shown_);
  }

  void finish(const Run& run) {
    file_.write_end(run);
    bar_.interrupt();
  }

 private:
  pacer::ProgressBar bar_;
  pacer::ProgressPoint shown_;
  RunFile file_;
};

fs::path make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  pacer::require(fs::is_directory(folder), "cannot create the output folder ", folder.string(), ": ",
                 error ? error.message() : "it is not a folder");
  return folder;
}

std::string version_line() { return "LibTorch " TORCH_VERSION ", compiler " __VERSION__; }

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::array<char, 16> text;
  std::strftime(text.data(), text.size(), "%Y-%m-%d", &parts);
  return text.data();
}

// The pages of the project that this program was built in, as a file in `folder` refers to them; empty where
// they are no longer there.
std::string docs_from(const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(PACER_DOCS, error)) return {};
  const fs::path relative = fs::relative(PACER_DOCS, folder, error);
  return error ? std::string() : relative.generic_string();
}

// The texts and what is trained on them. With fine-tuning the arms have settings and a text of their own.
struct Texts {
  explicit Texts(const Settings& settings)
      : first(read_corpus(settings.data, settings.data_limit, settings.sequence)) {
    if (!settings.fine_tune) return;
    arm_settings.emplace(settings.for_fine_tuning());
    second.emplace(read_corpus(arm_settings->data, settings.data_limit, settings.sequence));
  }

  Corpus first;
  std::optional<Corpus> second;
  std::optional<Settings> arm_settings;
};

fs::path run_folder(const Settings& settings, const std::string& arm, uint64_t seed) {
  return fs::path(settings.output) / (arm + "-seed-" + std::to_string(seed));
}

// All runs, in the order in which all ranks train them; a seed's base goes before its arms.
std::vector<RunPlan> plan_runs(const Settings& settings, const Texts& texts) {
  std::vector<RunPlan> plans;
  for (const uint64_t seed : settings.seeds) {
    const fs::path base = run_folder(settings, "base", seed);
    if (settings.fine_tune) {
      plans.push_back({"fused-adamw", seed, settings, texts.first, base, /*is_base=*/true});
    }
    for (const std::string& arm : settings.arms) {
      const fs::path folder = run_folder(settings, arm, seed);
      if (settings.fine_tune) {
        plans.push_back(
            {arm, seed, *texts.arm_settings, *texts.second, folder, /*is_base=*/false, weights_file(base)});
      } else {
        plans.push_back({arm, seed, settings, texts.first, folder});
      }
    }
  }
  return plans;
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
void check_stored_runs(const std::vector<RunPlan>& plans) {
  for (const RunPlan& plan : plans) {
    const bool is_stored = plan.settings.resume && fs::exists(plan.folder / "settings.ini");
    if (is_stored) require_same_settings(plan.folder, plan.settings);
  }
}

// The run of a plan: from its folder, continued, or trained anew.
Run make_run(const RunPlan& plan, const std::string& place, const Machine& machine) {
  const Settings& settings = plan.settings;
  const fs::path& folder = plan.folder;
  pacer::Communicator& world = *machine.world;
  Run stored;
  const bool is_stored = settings.resume && fs::exists(folder / "settings.ini");
  if (is_stored) stored = read_run(folder, plan.name(), plan.seed);
  stored.processes = settings.processes;
  require_same_view(folder, is_stored, stored, world);
  if (stored.finished) {
    if (world.rank() == 0) print_result(name_of(plan) + ", finished before", stored);
    return stored;
  }
  std::optional<RunRecorder> recorder;  // on rank 0
  if (world.rank() == 0) {
    make_folder(folder);
    if (!is_stored) {
      fs::remove_all(folder / "checkpoints");  // of another study
      fs::remove(folder / "metrics.jsonl");
    }
    examples::write_whole_file(folder / "settings.ini", settings_as_ini(settings));
    recorder.emplace(plan, place, stored);
  }
  world.barrier();
  RunObserver nobody;
  RunObserver* const observer = recorder ? &*recorder : &nobody;
  const Run run = train(plan, machine, stored, observer);
  if (recorder) {
    recorder->finish(run);
    print_result(name_of(plan), run);
  }
  return run;
}

}  // namespace

void check_study(const Settings& settings) {
  check_fine_tuning(settings);
  const Texts texts(settings);
  check_stored_runs(plan_runs(settings, texts));
}

void run_study(const Settings& settings) {
  check_fine_tuning(settings);
  const Texts texts(settings);
  const std::vector<RunPlan> plans = plan_runs(settings, texts);
  check_stored_runs(plans);
  const Machine machine = prepare_machine(settings);
  if (machine.world->rank() != 0) {
    for (const RunPlan& plan : plans) make_run(plan, "", machine);
    return;
  }
  const fs::path output = make_folder(settings.output);
  StudyReport report;
  report.headline = count_of(static_cast<int64_t>(settings.arms.size()), "arm") + ", " +
                    count_of(int64_t(settings.seeds.size()), "seed") + ", " +
                    short_count(static_cast<double>(plans.back().settings.tokens)) + " tokens per run";
  report.facts = {{"Text", plans.back().corpus.description},
                  {"Model", "byte-level GPT, " + std::to_string(settings.layers) + " layers of width " +
                                std::to_string(settings.width) + ", " +
                                short_count(static_cast<double>(count_parameters(settings))) + " parameters"},
                  {"Machine", machine.description + ", " + settings.precision},
                  {"Versions", version_line()}};
  report.date = today();
  report.docs = docs_from(output);
  report.hints = hints(settings.arms, settings.processes);
  if (settings.fine_tune) report.facts.insert(report.facts.begin(), {"Base text", texts.first.description});
  std::printf("%s\n\n", report.headline.c_str());
  for (const auto& [name, value] : report.facts) std::printf("%-9s %s\n", name.c_str(), value.c_str());
  std::printf("\n");
  examples::write_whole_file(output / "settings.ini", settings_as_ini(settings));

  const bool arms_alone = settings.seeds.size() == 1 && !settings.fine_tune;
  for (size_t i = 0; i < plans.size(); ++i) {
    const RunPlan& plan = plans[i];
    const std::string place = std::string(arms_alone ? "arm " : "run ") + std::to_string(i + 1) + " of " +
                              std::to_string(plans.size());
    (plan.is_base ? report.bases : report.runs).push_back(make_run(plan, place, machine));
    if (report.runs.empty()) continue;
    // After every run, so that a study that is cut short leaves what it has.
    report.settings = settings_as_ini(settings);
    examples::write_whole_file(output / "report.html", report_as_html(report));
  }
  const auto summaries = summarize(report.runs);
  for (const Table& table : tables_of(summaries, report.bases)) std::printf("\n%s", as_text(table).c_str());
  std::printf("\n%s\n\n%s", (table_note(summaries) + fine_tuning_note(report.bases)).c_str(),
              what_to_look_at(settings.arms, settings.processes).c_str());
  std::printf("\nCurves: %s\n", (output / "report.html").c_str());
}

}  // namespace convergence
