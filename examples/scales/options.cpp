// Names and ranges are checked here.
#include "options.h"

#include <sstream>
#include <utility>
#include <vector>

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "models.h"
#include "support/command_line.h"

namespace scales {
namespace {

namespace po = boost::program_options;

template <class Value>
using Choices = std::vector<std::pair<std::string, Value>>;

const Choices<Optimizer> kOptimizers = {{"adamw", Optimizer::adamw},
                                        {"onebit-adam", Optimizer::onebit_adam},
                                        {"lamb", Optimizer::lamb},
                                        {"onebit-lamb", Optimizer::onebit_lamb}};
const Choices<ScaleUnit> kUnits = {{"buffer", ScaleUnit::buffer},
                                   {"tensor", ScaleUnit::tensor},
                                   {"block", ScaleUnit::block},
                                   {"none", ScaleUnit::none}};
const Choices<bool> kSchedules = {{"cosine", true}, {"constant", false}};

template <class Value>
std::string name_of(Value wanted, const Choices<Value>& choices) {
  for (const auto& [name, value] : choices) {
    if (value == wanted) return name;
  }
  return {};
}

po::options_description description(const Options& defaults) {
  const auto text = [](const char* name, const std::string& otherwise) {
    return po::value<std::string>()->value_name(name)->default_value(otherwise);
  };
  const auto number = [](auto otherwise) {
    return po::value<decltype(otherwise)>()->value_name("N")->default_value(otherwise);
  };
  auto method = examples::make_options("Method");
  method.add_options()                                                                            //
      ("model", text("gpt|gru|conv|embedding", defaults.model), "what is trained; see models.h")  //
      ("optimizer", text("adamw|onebit-adam|lamb|onebit-lamb", "onebit-adam"), "what trains it")  //
      ("scales", text("buffer|tensor|block|none", "buffer"),
       "what shares a scale: all elements, those of a tensor (always textbook.h), 2,048 neighbours; none: "
       "the variance is frozen, but nothing travels as signs")  //
      ("textbook",
       "the optimizer restated in textbook.h also where the scales are of the buffer or of blocks; it sends "
       "floats")  //
      ("compare", "trains with textbook.h and with pacer, and says how far their parameters lie apart");
  auto run = examples::make_options("Run");
  run.add_options()                                                                                     //
      ("seed", number(int64_t{1}), "of initial values and batches")                                     //
      ("ranks", number(int64_t{defaults.ranks}), "threads of this process, each with its own batches")  //
      ("steps", number(defaults.steps), "to train for")                                                 //
      ("freeze", number(defaults.freeze), "steps of warm-up before momentum travels as signs")          //
      ("learning-rate", po::value<double>()->value_name("R")->default_value(defaults.learning_rate, "2e-3"),
       "at its peak")  //
      ("schedule", text("cosine|constant", "cosine"),
       "of the rate, after a rise over a tenth of the steps: down to zero, or as it is")  //
      ("data", po::value<std::string>()->value_name("FILE"),
       "a text, or a folder of them; left out: LibTorch's headers")  //
      ("threads", number(int64_t{defaults.threads}), "for each rank's own work");
  auto all = examples::make_options({});
  all.add(method).add(run);
  return all;
}

void check(const Options& options) {
  const bool sends_signs =
      options.optimizer == Optimizer::onebit_adam || options.optimizer == Optimizer::onebit_lamb;
  pacer::require(sends_signs || options.unit == ScaleUnit::buffer,
                 "--scales says nothing to an optimizer that sends no signs; leave it out");
  pacer::require(sends_signs || !(options.textbook || options.compare),
                 "--textbook and --compare need --optimizer onebit-adam or onebit-lamb");
  pacer::require(!options.compare || options.unit == ScaleUnit::buffer || options.unit == ScaleUnit::block,
                 "--compare needs scales that both have; choose --scales buffer or block");
  pacer::require(!options.textbook || options.unit != ScaleUnit::none,
                 "--textbook always sends signs; choose other --scales than none");
  pacer::require(options.freeze < options.steps, "--freeze ", options.freeze, " leaves none of ",
                 options.steps, " steps to compress; choose a smaller one");
}

}  // namespace

std::optional<Options> read_options(int argument_count, char** arguments) {
  Options options;
  const auto read = examples::read_command_line(
      argument_count, arguments,
      "Trains a small model on text with one optimizer, its ranks threads of this process, and\n"
      "prints the loss: what a scale for all signs, for each tensor's or for each 2,048 is worth.\n"
      "scales.sh trains all combinations and prints tables.\n\n"
      "  scales --model gru --scales block --learning-rate 4e-3 --data book.txt\n"
      "  scales --model gru --scales block --compare --steps 80\n",
      description(options));
  if (!read) return std::nullopt;
  const examples::OptionValues& given = *read;
  Choices<std::string> models;
  for (const std::string& name : model_names()) models.emplace_back(name, name);
  options.model = examples::choice_of(given, "model", models);
  options.optimizer = examples::choice_of(given, "optimizer", kOptimizers);
  options.unit = examples::choice_of(given, "scales", kUnits);
  options.cosine = examples::choice_of(given, "schedule", kSchedules);
  options.textbook = given.count("textbook") != 0;
  options.compare = given.count("compare") != 0;
  options.seed = static_cast<uint64_t>(examples::value_in<int64_t>(given, "seed", 0, 1'000'000));
  options.ranks = static_cast<int>(examples::value_in<int64_t>(given, "ranks", 2, 64));
  options.steps = examples::value_in<int64_t>(given, "steps", 10, 1'000'000);
  options.freeze = examples::value_in<int64_t>(given, "freeze", 1, 1'000'000);
  options.learning_rate = examples::value_in<double>(given, "learning-rate", 1e-9, 10);
  options.threads = static_cast<int>(examples::value_in<int64_t>(given, "threads", 1, 1024));
  if (given.count("data") != 0) options.data = given["data"].as<std::string>();
  check(options);
  return options;
}

std::string describe(const Options& options) {
  std::ostringstream text;
  text << "--model " << options.model << " --optimizer " << name_of(options.optimizer, kOptimizers)
       << " --scales " << name_of(options.unit, kUnits) << (options.textbook ? " --textbook" : "")
       << " --seed " << options.seed << " --ranks " << options.ranks << " --steps " << options.steps
       << " --freeze " << options.freeze << " --learning-rate " << options.learning_rate << " --schedule "
       << name_of(options.cosine, kSchedules);
  return text.str();
}

}  // namespace scales
