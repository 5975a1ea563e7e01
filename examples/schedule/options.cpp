#include "options.h"

#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>

namespace schedule {
namespace {

namespace po = boost::program_options;
using examples::OptionValues;
using pacer::Decay;
using pacer::LearningRateSchedule;
using RateOptions = pacer::LearningRateScheduleOptions;

constexpr int64_t kMostLayers = 1'000;
constexpr int64_t kMostTokensPerStep = 100'000'000'000;  // times 2^24 micro-steps they still are an int64_t

struct Kind {
  LearningRateSchedule (*make)(const RateOptions& options, Decay way);
  bool has_total = false;       // decays over the run
  bool follows_tokens = false;  // or over its tokens
  // What it takes unless --decay says so; nothing where it has no choice.
  std::optional<Decay> way = std::nullopt;
};

const std::vector<std::pair<std::string, Kind>> kKinds = {
    {"constant", {[](const RateOptions& o, Decay) { return pacer::constant_schedule(o); }}},
    {"linear", {[](const RateOptions& o, Decay) { return pacer::warmup_linear(o); }, true, true}},
    {"cosine", {[](const RateOptions& o, Decay) { return pacer::warmup_cosine(o); }, true, true}},
    {"polynomial", {[](const RateOptions& o, Decay) { return pacer::warmup_polynomial(o); }, true, true}},
    {"exponential", {[](const RateOptions& o, Decay) { return pacer::warmup_exponential(o); }}},
    {"inverse-sqrt", {[](const RateOptions& o, Decay) { return pacer::warmup_inverse_sqrt(o); }}},
    {"stable-decay", {pacer::warmup_stable_decay, true, true, Decay::linear}},
    {"cosine-restarts", {[](const RateOptions& o, Decay) { return pacer::warmup_cosine_restarts(o); }}},
    {"one-cycle", {pacer::one_cycle, true, false, Decay::cosine}}};

const std::vector<std::pair<std::string, Decay>> kWays = {{"linear", Decay::linear},
                                                          {"cosine", Decay::cosine},
                                                          {"polynomial", Decay::polynomial},
                                                          {"minus-sqrt", Decay::minus_sqrt},
                                                          {"halving", Decay::halving}};

bool has(const OptionValues& given, const char* name) { return given.count(name) != 0; }

bool is_on(const OptionValues& given, const char* name) { return has(given, name) && given[name].as<bool>(); }

// Refuses an option that does nothing without another one.
void require_beside(const OptionValues& given, const char* option, const char* other, const char* meaning) {
  const bool is_given =
      has(given, option) && (given[option].value().type() != typeid(bool) || is_on(given, option));
  pacer::require(!is_given || has(given, other), "--", option, " ", meaning, "; give --", other,
                 " beside it, or leave it out");
}

int64_t whole(double value, const std::string& name, int64_t least, int64_t most) {
  pacer::require(
      value >= static_cast<double>(least) && value <= static_cast<double>(most) && value == std::floor(value),
      name, " must be a whole number from ", least, " to ", most, ", not ", value);
  return static_cast<int64_t>(value);
}

// Counts may be written as 4e9.
std::optional<int64_t> count_of(const OptionValues& given, const char* name, int64_t least, int64_t most) {
  if (!has(given, name)) return std::nullopt;
  return whole(given[name].as<double>(), std::string("--") + name, least, most);
}

std::optional<double> number_of(const OptionValues& given, const char* name) {
  return has(given, name) ? std::optional(given[name].as<double>()) : std::nullopt;
}

double number_in(const std::string& text, const std::string& list) {
  double number = NAN;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  pacer::require(
      result.ec == std::errc() && result.ptr == end, "--batch ", examples::shown(list), ": '",
      examples::shown(text),
      "' is no number; write micro-steps at first, then PROGRESS:MICRO-STEPS, as in 4,1000:8,5000:16");
  return number;
}

struct Batch {
  pacer::BatchSchedule schedule;
  int64_t first;
};

Batch read_batch(const std::string& list, bool by_tokens) {
  constexpr int64_t kMostMicroSteps = (1 << 24) - 1;
  const auto items = examples::split(list);
  const auto micro_steps = [&](const std::string& text) {
    return whole(number_in(text, list), "--batch: the number of micro-steps", 1, kMostMicroSteps);
  };
  pacer::require(items.size() > 1, "--batch ", examples::shown(list),
                 " does not say where the batch changes; write 4,1000:8 for example, or leave it out");
  pacer::BatchSchedule::Table table;
  for (size_t i = 1; i < items.size(); ++i) {
    const size_t colon = items[i].find(':');
    pacer::require(colon != std::string::npos, "--batch ", examples::shown(list), ": '",
                   examples::shown(items[i]), "' is not PROGRESS:MICRO-STEPS, as 1000:8 is");
    table.emplace_back(whole(number_in(items[i].substr(0, colon), list), "--batch: where the batch changes",
                             1, by_tokens ? kMostTokens : kMostSteps),
                       micro_steps(items[i].substr(colon + 1)));
  }
  const int64_t first = micro_steps(items.front());
  auto schedule = pacer::BatchSchedule(first).table(std::move(table));
  if (by_tokens) schedule.by_tokens();
  return {schedule, first};
}

std::optional<pacer::LengthSchedule> read_length(const OptionValues& given) {
  constexpr int64_t kMostLength = 1 << 30;
  if (!has(given, "length-first")) {
    for (const char* name : {"length-last", "length-ramp", "length-by-tokens"}) {
      require_beside(given, name, "length-first", "belongs to a length that grows");
    }
    return std::nullopt;
  }
  require_beside(given, "length-first", "length-last", "belongs to a length that grows");
  require_beside(given, "length-first", "length-ramp", "belongs to a length that grows");
  pacer::LengthSchedule length(*count_of(given, "length-first", 1, kMostLength),
                               *count_of(given, "length-last", 1, kMostLength));
  if (is_on(given, "length-by-tokens"))
    return length.ramp_tokens(*count_of(given, "length-ramp", 0, kMostTokens));
  return length.ramp_steps(*count_of(given, "length-ramp", 0, kMostSteps));
}

StepSizes read_sizes(const OptionValues& given) {
  StepSizes sizes;
  require_beside(given, "batch-by-tokens", "batch", "belongs to a batch that changes");
  int64_t first = 1;
  if (has(given, "batch")) {
    const Batch batch = read_batch(given["batch"].as<std::string>(), is_on(given, "batch-by-tokens"));
    sizes.batch = batch.schedule;
    first = batch.first;
  }
  sizes.length = read_length(given);
  if (const auto tokens = count_of(given, "tokens-per-step", 1, kMostTokensPerStep)) {
    // Micro-steps are equal, and sequences whole.
    const int64_t last = sizes.length ? sizes.length->last() : 1;
    const std::string micro_steps = sizes.batch ? "the micro-steps at first" : "";
    const std::string length = sizes.length ? "the tokens of a sequence in the end" : "";
    pacer::require(*tokens % (first * last) == 0, "--tokens-per-step must be a multiple of ", first * last,
                   ", ", micro_steps, sizes.batch && sizes.length ? " times " : "", length, ", not ",
                   *tokens);
    sizes.sequences = *tokens / (first * last);
  }
  return sizes;
}

RateOptions read_rate_options(const OptionValues& given, bool has_total, const Place& end) {
  const auto count = [&](const char* name) { return count_of(given, name, 0, kMostTokens); };
  RateOptions options(count("warmup").value_or(0));
  if (has_total && is_on(given, "by-tokens")) {
    options.total_tokens(count("tokens").value_or(end.tokens));
  } else if (has_total) {
    options.total_steps(end.steps);
  }
  options.decay_steps(count("decay-steps")).decay_tokens(count("decay-tokens"));
  options.start_factor(number_of(given, "start-factor")).end_factor(number_of(given, "end-factor"));
  options.power(number_of(given, "power")).gamma(number_of(given, "gamma")).every(count("every"));
  return options.cycle_steps(count("cycle-steps")).cycle_growth(count("cycle-growth"));
}

// The schedule of the rate by name, before the run is known.
struct Choice {
  std::string name;
  Kind kind;
  Decay way;
};

Choice read_choice(const OptionValues& given) {
  const std::string name = given["schedule"].as<std::string>();
  const Kind kind = examples::choice_of(given, "schedule", kKinds);
  const Decay way =
      has(given, "decay") ? examples::choice_of(given, "decay", kWays) : kind.way.value_or(Decay::linear);
  pacer::require(!has(given, "decay") || kind.way, "--decay is not for --schedule ", name,
                 ", which has one way down; leave it out or take stable-decay or one-cycle");
  const bool by_tokens = is_on(given, "by-tokens");
  pacer::require(
      !by_tokens || kind.follows_tokens, "--by-tokens is not for --schedule ", name,
      ", which has no decay that follows tokens; leave it out or take linear, cosine, polynomial or "
      "stable-decay");
  const char* wrong = by_tokens ? "decay-steps" : "decay-tokens";
  pacer::require(!has(given, wrong) || !kind.follows_tokens, "--", wrong, ": the decay follows ",
                 by_tokens ? "tokens; give --decay-tokens, or leave --by-tokens out"
                           : "steps; give --decay-steps, or --by-tokens");
  return {name, kind, way};
}

LearningRateSchedule read_rate(const OptionValues& given, const Choice& choice, const Place& end) {
  require_beside(given, "start-factor", "warmup", "is where the warm-up begins");
  try {
    return choice.kind.make(read_rate_options(given, choice.kind.has_total, end), choice.way);
  } catch (const pacer::InvalidArgument& error) {
    throw pacer::InvalidArgument("--schedule " + choice.name + ": " + error.what());
  }
}

void read_layers(const OptionValues& given, Run* run) {
  for (const char* name : {"layer-drop-theta", "layer-drop-gamma"}) {
    require_beside(given, name, "layers", "belongs to layers that are dropped");
  }
  run->layers = count_of(given, "layers", 1, kMostLayers).value_or(0);
  constexpr double kRuleOfThumb = 100;  // of the header of LayerDropOptions
  run->layer_drop.gamma(
      number_of(given, "layer-drop-gamma").value_or(kRuleOfThumb / static_cast<double>(run->end.steps)));
  run->layer_drop.theta_bar(number_of(given, "layer-drop-theta").value_or(run->layer_drop.theta_bar()));
}

}  // namespace

po::options_description known_options() {
  const auto number = [](const char* name) { return po::value<double>()->value_name(name); };
  const auto word = [](const char* name) { return po::value<std::string>()->value_name(name); };
  auto known = examples::make_options();
  known.add_options()                                                                   //
      ("steps", number("N"), "length of the run")                                       //
      ("tokens", number("N"), "or this: the run ends with the step that reaches them")  //
      ("tokens-per-step", number("N"),
       "over all ranks, in a step of the first batch and the full length; needed where something follows "
       "tokens")                                                                                  //
      ("learning-rate", number("RATE")->default_value(1, "1"), "the peak; 1 shows shares of it")  //
      ("schedule",
       word("constant|linear|cosine|polynomial|exponential|inverse-sqrt|stable-decay|cosine-restarts|one-"
            "cycle")
           ->default_value("cosine"),
       "of the rate; what decays arrives with the end of the run")                                       //
      ("warmup", number("STEPS"), "none unless set")                                                     //
      ("start-factor", number("SHARE"), "of the peak, at which the warm-up begins; 0, one-cycle 0.04")   //
      ("end-factor", number("SHARE"), "of the peak, at which the decay ends; 0, one-cycle 4e-6")         //
      ("by-tokens", examples::make_switch(), "the decay follows tokens, not steps")                      //
      ("decay-steps", number("N"), "the last ones, which decay; needed by stable-decay, otherwise all")  //
      ("decay-tokens", number("N"), "the same with --by-tokens")                                         //
      ("decay", word("linear|cosine|polynomial|minus-sqrt|halving"),
       "the way of stable-decay, linear unless set; one-cycle: cosine or linear")      //
      ("power", number("P"), "of polynomial; 1")                                       //
      ("gamma", number("FACTOR"), "of one decay of exponential")                       //
      ("every", number("STEPS"), "between two decays of exponential; 1")               //
      ("cycle-steps", number("N"), "of the first cycle of cosine-restarts")            //
      ("cycle-growth", number("K"), "each further cycle is so many times as long; 1")  //
      ("batch", word("LIST"),
       "4,1000:8,5000:16 for 4 micro-steps a step at first, 8 from step 1,000 and 16 from step 5,000 on")  //
      ("batch-by-tokens", examples::make_switch(), "these are tokens, not steps")                          //
      ("length-first", number("TOKENS"), "of a sequence at first; longer ones are cut")                    //
      ("length-last", number("TOKENS"), "of a sequence in the end")                                        //
      ("length-ramp", number("STEPS"), "over which the length grows")                                      //
      ("length-by-tokens", examples::make_switch(), "the length grows over tokens, not steps")             //
      ("layers", number("L"), "of a stack that drops layers; expected values are shown")                   //
      ("layer-drop-theta", number("SHARE"), "of steps in which the deepest layer runs in the end; 0.5")    //
      ("layer-drop-gamma", number("G"), "how fast that is approached, per step; 100 / steps of the run")   //
      ("svg", word("FILE"), "draw each column into this file")                                             //
      ("over-tokens", examples::make_switch(), "the drawing goes over tokens, not steps")                  //
      ("csv", word("FILE"), "write the columns of each step, or of 2,000, into this file");
  return known;
}

Run read_run(const OptionValues& given) {
  const Choice choice = read_choice(given);
  pacer::require(has(given, "steps") || has(given, "tokens"),
                 "say how long the run is: --steps, or --tokens and --tokens-per-step");
  pacer::require(!has(given, "steps") || !has(given, "tokens"),
                 "--steps and --tokens both say how long the run is; give one of them");
  for (const char* name : {"tokens", "by-tokens", "batch-by-tokens", "length-by-tokens", "over-tokens"}) {
    require_beside(given, name, "tokens-per-step", "counts tokens");
  }
  require_beside(given, "over-tokens", "svg", "belongs to a drawing");
  const double peak = given["learning-rate"].as<double>();
  pacer::require(peak > 0 && std::isfinite(peak), "--learning-rate must be positive and finite, not ", peak);
  const StepSizes sizes = read_sizes(given);
  const Place end =
      end_of_run(sizes, count_of(given, "steps", 1, kMostSteps), count_of(given, "tokens", 1, kMostTokens));
  Run run = {sizes, end, peak, read_rate(given, choice, end)};
  run.decays = choice.name != "constant";
  read_layers(given, &run);
  return run;
}

}  // namespace schedule
