// Lines out and in.
#include "run_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

#include "convergence/option_table.h"
#include "support/command_line.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

// Settings that may change between the parts of a study.
constexpr std::array<const char*, 4> kFreeSettings = {"arms", "seeds", "output", "checkpoint-every"};

struct Field {
  const char* name;
  double TrainingPoint::*member;
};
constexpr std::array<Field, 11> kFields = {{{"seconds", &TrainingPoint::seconds},
                                            {"loss", &TrainingPoint::loss},
                                            {"learning_rate", &TrainingPoint::learning_rate},
                                            {"gradient_norm", &TrainingPoint::gradient_norm},
                                            {"sequence_length", &TrainingPoint::sequence_length},
                                            {"kept_layers", &TrainingPoint::kept_layers},
                                            {"theta", &TrainingPoint::theta},
                                            {"micro_steps", &TrainingPoint::micro_steps},
                                            {"bytes_sent", &TrainingPoint::bytes_sent},
                                            {"memory_bytes", &TrainingPoint::memory_bytes},
                                            {"optimizer_seconds", &TrainingPoint::optimizer_seconds}}};

// What one line holds.
struct Event {
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;

  // NaN where the line does not have it: it was not measured, or the file is older.
  double number(const std::string& key) const {
    const auto found = numbers.find(key);
    return found == numbers.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
  }
  int64_t count(const std::string& key) const {
    const double value = number(key);
    return std::isnan(value) ? 0 : static_cast<int64_t>(value);
  }
};

Event read_event(std::string line, const fs::path& path) {
  pacer::JsonScanner scanner(line.data(), line.size(), /*first_byte=*/0, path.string() + ", a line");
  Event event;
  scanner.expect('{');
  do {
    const std::string key(scanner.string());
    scanner.expect(':');
    if (scanner.peek() == '"') {
      event.texts[key] = scanner.string();
    } else {
      event.numbers[key] = scanner.number();
    }
  } while (scanner.more('}'));
  scanner.expect_end();
  return event;
}

std::map<std::string, std::string> read_ini(const fs::path& path) {
  std::ifstream file(path);
  pacer::require<pacer::FileError>(file.is_open(), "cannot read ", path.string(),
                                   ", the settings of a run to resume; train again without --resume");
  // Older files do not say.
  std::map<std::string, std::string> values = {{"processes", "1"},      {"ranks-per-node", "0"},
                                               {"fine-tune", "false"},  {"fine-tune-tokens", "0"},
                                               {"fine-tune-rate", "0"}, {"lora-rank", "8"}};
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find(" = ");
    if (line.front() != '#' && equals != std::string::npos) {
      values[line.substr(0, equals)] = line.substr(equals + 3);
    }
  }
  return values;
}

}  // namespace

void RunFile::write(const pacer::JsonLine& line) {
  if (!file_) file_.emplace(path_);
  file_->write(line);
}

void RunFile::write_training(const TrainingPoint& point) {
  pacer::JsonLine line;
  line.add("event", "training").add("step", point.step).add("tokens", point.tokens);
  for (const auto& [name, member] : kFields) {
    if (!std::isnan(point.*member)) line.add(name, point.*member);
  }
  write(line);
}

void RunFile::write_validation(const CurvePoint& point) {
  write(pacer::JsonLine()
            .add("event", "validation")
            .add("tokens", point.tokens)
            .add("seconds", point.seconds)
            .add("loss", point.value));
}

void RunFile::write_end(const Run& run) {
  for (const TensorScales& tensor : run.tensors) {
    write(pacer::JsonLine()
              .add("event", "tensor")
              .add("name", tensor.name)
              .add("elements", tensor.elements)
              .add("coefficient", tensor.coefficient)
              .add("factor", tensor.factor)
              .add("momentum_scale", tensor.momentum_scale));
  }
  write(pacer::JsonLine()
            .add("event", "end")
            .add("tokens", run.validation.back().tokens)
            .add("seconds", run.seconds())
            .add("loss", run.validation.back().value)
            .add("processes", run.processes)
            .add("parameters", run.parameters)
            .add("frozen_at", run.frozen_at)
            .add("largest_update", run.largest_update)
            .add("bytes_sent", run.bytes_sent())
            .add("step_seconds", run.step_seconds())
            .add("optimizer_seconds", run.optimizer_seconds()));
}

Run read_run(const fs::path& folder, const std::string& arm, uint64_t seed) {
  Run run;
  run.arm = arm;
  run.seed = seed;
  const fs::path path = folder / "metrics.jsonl";
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.back() != '}') break;  // cut off while it was written
    Event event = read_event(line, path);
    const std::string kind = event.texts["event"];
    if (kind == "training") {
      TrainingPoint point;
      point.step = event.count("step");
      point.tokens = event.count("tokens");
      for (const auto& [name, member] : kFields) point.*member = event.number(name);
      run.training.push_back(point);
    } else if (kind == "validation") {
      run.validation.push_back({event.count("tokens"), event.number("seconds"), event.number("loss")});
    } else if (kind == "tensor") {
      run.tensors.push_back({event.texts["name"], event.count("elements"), event.number("coefficient"),
                             event.number("factor"), event.number("momentum_scale")});
    } else if (kind == "end") {
      run.parameters = event.count("parameters");
      run.frozen_at = event.count("frozen_at");
      // 0 also where it is not known.
      run.largest_update = std::max(0.0, event.number("largest_update"));
      run.finished = !run.training.empty() && !run.validation.empty();
    }
  }
  return run;
}

void require_same_settings(const fs::path& folder, const Settings& settings) {
  const fs::path path = folder / "settings.ini";
  auto stored = read_ini(path);
  Settings copy = settings;
  for (const auto& group : option_groups(&copy)) {
    for (const auto& option : group.options.options()) {
      const std::string& name = option->long_name();
      const bool free = std::find(kFreeSettings.begin(), kFreeSettings.end(), name) != kFreeSettings.end();
      const std::string now = examples::default_text(*option), before = stored[name];
      pacer::require(free || now == before, "--resume: ", folder.string(), " was trained with ", name, " = ",
                     before.empty() ? "its default" : before, ", not ", now.empty() ? "its default" : now,
                     "; set it as it was, or choose another --output");
    }
  }
}

}  // namespace convergence
