// Lines out and in. Only RunFile's own lines are read, so a key and the number behind it are all there is to
// parse.
#include "run_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include <pacer/core/error.h>

#include "option_table.h"

namespace convergence {
namespace {

namespace fs = std::filesystem;

// Settings that may change between the parts of a study.
constexpr std::array<const char*, 4> kFreeSettings = {"arms", "seeds", "output", "checkpoint-every"};

struct Field {
  const char* name;
  double TrainingPoint::*member;
};
constexpr std::array<Field, 8> kFields = {{{"seconds", &TrainingPoint::seconds},
                                           {"loss", &TrainingPoint::loss},
                                           {"learning_rate", &TrainingPoint::learning_rate},
                                           {"gradient_norm", &TrainingPoint::gradient_norm},
                                           {"sequence_length", &TrainingPoint::sequence_length},
                                           {"kept_layers", &TrainingPoint::kept_layers},
                                           {"bytes_sent", &TrainingPoint::bytes_sent},
                                           {"optimizer_seconds", &TrainingPoint::optimizer_seconds}}};

// The number behind "key": in a line of flat JSON, NaN where the key is missing.
template <class Number>
Number number_of(const std::string& line, const std::string& key, const fs::path& path) {
  const std::string quoted = "\"" + key + "\":";
  const size_t at = line.find(quoted);
  if (at == std::string::npos && std::is_floating_point_v<Number>)
    return std::numeric_limits<Number>::quiet_NaN();
  Number number = 0;
  const bool found =
      at != std::string::npos &&
      std::from_chars(line.data() + at + quoted.size(), line.data() + line.size(), number).ec == std::errc();
  pacer::require<pacer::FileError>(found, path.string(), " has a line without the number '", key,
                                   "'; train again without --resume");
  return number;
}

// The text behind "key":", which has no quotes in it.
std::string text_of(const std::string& line, const std::string& key, const fs::path& path) {
  const std::string quoted = "\"" + key + "\":\"";
  const size_t at = line.find(quoted), begin = at + quoted.size();
  pacer::require<pacer::FileError>(at != std::string::npos, path.string(), " has a line without the text '",
                                   key, "'; train again without --resume");
  return line.substr(begin, line.find('"', begin) - begin);
}

// A count that older files do not have.
int64_t count_or_zero(const std::string& line, const std::string& key, const fs::path& path) {
  const auto count = number_of<double>(line, key, path);
  return std::isnan(count) ? 0 : static_cast<int64_t>(count);
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
    const auto is = [&](const std::string& event) {
      return line.rfind("{\"event\":\"" + event + "\"", 0) == 0;
    };
    if (is("training")) {
      TrainingPoint point;
      point.step = number_of<int64_t>(line, "step", path);
      point.tokens = number_of<int64_t>(line, "tokens", path);
      for (const auto& [name, member] : kFields) point.*member = number_of<double>(line, name, path);
      run.training.push_back(point);
    } else if (is("validation")) {
      run.validation.push_back({number_of<int64_t>(line, "tokens", path),
                                number_of<double>(line, "seconds", path),
                                number_of<double>(line, "loss", path)});
    } else if (is("tensor")) {
      run.tensors.push_back({text_of(line, "name", path), number_of<int64_t>(line, "elements", path),
                             number_of<double>(line, "coefficient", path),
                             number_of<double>(line, "factor", path),
                             number_of<double>(line, "momentum_scale", path)});
    } else if (is("end")) {
      run.parameters = count_or_zero(line, "parameters", path);
      run.frozen_at = count_or_zero(line, "frozen_at", path);
      const auto largest = number_of<double>(line, "largest_update", path);
      run.largest_update = std::isnan(largest) ? 0.0 : largest;
      run.finished = !run.training.empty() && !run.validation.empty();
    }
  }
  return run;
}

void require_same_settings(const fs::path& folder, const Settings& settings) {
  const fs::path path = folder / "settings.ini";
  auto stored = read_ini(path);
  for (const auto& group : option_groups({})) {
    for (const auto& option : group.options) {
      const bool free =
          std::find(kFreeSettings.begin(), kFreeSettings.end(), option.name) != kFreeSettings.end();
      const std::string now = option.show(settings), before = stored[option.name];
      pacer::require(free || now == before, "--resume: ", folder.string(), " was trained with ", option.name,
                     " = ", before.empty() ? "its default" : before, ", not ",
                     now.empty() ? "its default" : now, "; set it as it was, or choose another --output");
    }
  }
}

}  // namespace convergence
