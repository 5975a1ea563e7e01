// Values are read strictly: the whole text, in range, and finite. What is wrong with one is a sentence without
// the option's name, which the command line adds.
#include "option_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <sstream>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>

#include "support/command_line.h"
#include "support/nearest_name.h"

namespace convergence {
namespace {

namespace po = boost::program_options;
using Value = po::typed_value<std::string>;
using Text = const std::string&;

constexpr size_t kMostSeeds = 1000;
constexpr int64_t kMostTokens = 1000000000000000, kMostBytes = 1000000000000;

template <class Item>
std::string joined(const std::vector<Item>& items, const char* between = ",") {
  std::ostringstream text;
  for (const Item& item : items) text << (&item == items.data() ? "" : between) << item;
  return text.str();
}

// The parts between commas; spaces around them do not count.
std::vector<std::string> split(Text text) {
  std::vector<std::string> parts;
  std::istringstream rest(text + ",");
  for (std::string part; std::getline(rest, part, ',');) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    parts.push_back(part);
  }
  return parts;
}

template <class Item>
void append_new(const Item& item, std::vector<Item>* items) {
  pacer::require(std::count(items->begin(), items->end(), item) == 0, "'", item, "' is there twice");
  items->push_back(item);
}

// The number that the whole text is, whatever the locale; nothing for any other text.
template <class Number>
std::optional<Number> parsed(Text text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

void require_known(Text name, const std::vector<std::string>& known) {
  pacer::require(std::find(known.begin(), known.end(), name) != known.end(), "there is no '", name, "'; ",
                 examples::suggestion(name, known));
}

// Help calls the value `name`; `now` is what the settings hold, `take` lets them hold another.
Value* value(const std::string& name, const std::string& now, const std::function<void(Text)>& take) {
  return po::value<std::string>()->value_name(name)->default_value(now, "")->notifier(take);
}

// "300", "500k", "1.5M", "2G".
Value* count(const char* name, int64_t* setting, int64_t least, int64_t most) {
  return value(name, std::to_string(*setting), [=](Text text) {
    const char unit = text.empty() ? ' ' : text.back();
    const double factor = unit == 'k' ? 1e3 : unit == 'M' ? 1e6 : unit == 'G' ? 1e9 : 1.0;
    const std::string digits = text.substr(0, text.size() - (factor > 1.0 ? 1 : 0));
    const bool plain = digits.find_first_not_of("0123456789.") == std::string::npos;
    // Doubles hold every whole number up to 2^53, which is beyond every range in use.
    const double given = plain ? parsed<double>(digits).value_or(NAN) * factor : NAN;
    pacer::require(given == std::floor(given) && given >= static_cast<double>(least) &&
                       given <= static_cast<double>(most),
                   "expected a whole number from ", least, " to ", most);
    *setting = static_cast<int64_t>(given);
  });
}

Value* number(const char* name, double* setting, double least, double most, bool least_allowed = true) {
  return value(name, pacer::exact_text(*setting), [=](Text text) {
    const double given = parsed<double>(text).value_or(NAN);
    pacer::require((least_allowed ? given >= least : given > least) && given <= most, "expected a number ",
                   least_allowed ? "from " : "above ", least, least_allowed ? " to " : " and at most ", most);
    *setting = given;
  });
}

Value* path(const char* name, std::string* setting) {
  return value(name, *setting, [=](Text text) {
    pacer::require(!text.empty(), "expected a path");
    *setting = text;
  });
}

Value* choice(std::string* setting, const std::vector<std::string>& choices) {
  return value(joined(choices, "|"), *setting, [=](Text text) {
    require_known(text, choices);
    *setting = text;
  });
}

Value* named_arms(std::vector<std::string>* setting, const std::vector<std::string>& known) {
  return value("NAME,NAME", joined(*setting), [=](Text text) {
    std::vector<std::string> names;
    for (const std::string& arm : split(text)) {
      require_known(arm, known);
      append_new(arm, &names);
    }
    *setting = names;
  });
}

Value* seeds(std::vector<uint64_t>* setting) {
  return value("N,N", joined(*setting), [=](Text text) {
    std::vector<uint64_t> numbers;
    for (const std::string& part : split(text)) {
      const auto seed = parsed<uint64_t>(part);
      pacer::require(seed.has_value(),
                     "expected whole numbers from 0 to 18446744073709551615, separated by commas");
      append_new(*seed, &numbers);
    }
    pacer::require(numbers.size() <= kMostSeeds, "expected at most ", kMostSeeds, " seeds");
    *setting = numbers;
  });
}

po::typed_value<bool>* on(bool now, const std::function<void(bool)>& take) {
  return examples::make_switch()->default_value(now, "")->notifier(take);
}

struct Row {
  const char* name;
  const po::value_semantic* value;
  std::string help;
};

OptionGroup group(const char* title, const std::vector<Row>& rows) {
  OptionGroup group = {title, examples::make_options(title)};
  for (const Row& row : rows) group.options.add_options()(row.name, row.value, row.help.c_str());
  return group;
}

}  // namespace

std::vector<OptionGroup> option_groups(Settings* s, const std::vector<std::string>& arm_names) {
  const auto start = [s](const std::string& preset, bool quick, bool fine_tune) {
    *s = preset_settings(preset, quick, fine_tune);
  };
  return {
      group(
          "Study",
          {{"preset", value("tiny|small", s->preset, [=](Text text) { start(text, s->quick, s->fine_tune); }),
            "where all values below start from (default tiny)"},
           {"quick", on(s->quick, [=](bool quick) { start(s->preset, quick, s->fine_tune); }),
            "a short run on real text: the preset with a smaller budget"},
           {"fine-tune", on(s->fine_tune, [=](bool fine_tune) { start(s->preset, s->quick, fine_tune); }),
            "first train a base as fused-adamw is trained, then let the arms go on from it on a second text"},
           {"arms", named_arms(&s->arms, arm_names),
            "the arms to train, the first is the one others are compared with; --list names all of them, and "
            "those that are trained where none is named"},
           {"seeds", seeds(&s->seeds),
            "train every arm once per seed; two or more give standard errors (default 1)"},
           {"tokens", count("N", &s->tokens, 1, kMostTokens),
            "training budget of each run in tokens (bytes of text); 2M and 500k are understood (default 1M "
            "for tiny, 50M for small)"},
           {"evaluate-every", count("N", &s->evaluate_every, 0, kMostTokens),
            "tokens between validations; 0 makes it a sixteenth of the budget"},
           {"validation-sequences", count("N", &s->validation_sequences, 1, 1000000),
            "sequences per validation, the same ones every time"}}),
      group("Text",
            {{"data", path("FILE|FOLDER", &s->data),
              "the text to train on (default: LibTorch's own headers); the last tenth validates"},
             {"data-limit", count("N", &s->data_limit, 1, kMostBytes), "bytes of it to read at most"}}),
      group("Model", {{"layers", count("N", &s->layers, 1, 1000), "transformer blocks"},
                      {"width", count("N", &s->width, 1, 65536), "features per position"},
                      {"heads", count("N", &s->heads, 1, 1024), "attention heads; must divide the width"},
                      {"sequence", count("N", &s->sequence, 2, 65536), "bytes per sequence"}}),
      group("Recipe", {{"learning-rate", number("RATE", &s->learning_rate, 0, 10, /*least_allowed=*/false),
                        "its peak: linear warm-up over 5 % of the steps, then a cosine over the tokens to a "
                        "tenth (default 3e-3 for tiny, 6e-4 for small)"},
                       {"weight-decay", number("RATE", &s->weight_decay, 0, 10),
                        "decoupled decay of the matrices; vectors are never decayed (default 0.1)"},
                       {"clip", number("NORM", &s->clip, 0, 1e9),
                        "largest global gradient norm; 0 switches clipping off (default 1)"},
                       {"clip-by", choice(&s->clip_by, {"exact", "previous"}),
                        "exact clips by the norm of the step itself; with previous a 1-bit arm's compressed "
                        "steps are clipped by that of the step before, as buckets that travel behind "
                        "backward need it (default exact)"},
                       {"batch", count("N", &s->batch, 1, 65536), "sequences per step"}}),
      group("Methods",
            {{"curriculum-start", count("N", &s->curriculum_start, 0, 65536),
              "bytes per sequence at the start of a curriculum; 0 makes it an eighth of the sequence, at "
              "least 8 (default 0)"},
             {"curriculum-share", number("SHARE", &s->curriculum_share, 0, 1),
              "share of the budget after which sequences have their full length (default 0.4)"},
             {"decay-share", number("SHARE", &s->decay_share, 0, 1),
              "share of the budget over which the rate of stable-decay falls in the end (default 0.2)"},
             {"average-decay", number("DECAY", &s->average_decay, 0, 0.999999999),
              "share of the average of weights that stays at a step (default 0.999)"},
             {"layer-drop-theta", number("SHARE", &s->layer_drop_theta, 0, 1, /*least_allowed=*/false),
              "how often the deepest layer is kept in the end (default 0.5)"},
             {"layer-drop-gamma", number("RATE", &s->layer_drop_gamma, 0, 1e6),
              "how fast that is reached, per step; 0 makes it 100 / steps (default 0)"},
             {"layer-drop-depth",
              choice(&s->layer_drop_depth, {"linear", "from-zero", "uniform", "exponential"}),
              "which layers are dropped more: all alike with uniform, else deeper ones (default linear)"},
             {"layer-drop-time", choice(&s->layer_drop_time, {"rising", "constant", "falling", "up-down"}),
              "rising drops more and more, by layer-drop-gamma; constant does throughout; falling ends with "
              "the whole model when the budget is spent; up-down rises over half of the steps and falls over "
              "the others (default rising)"},
             {"onebit-freeze", number("SHARE", &s->onebit_freeze, 0, 1, /*least_allowed=*/false),
              "share of the steps after which 1-bit Adam freezes its variance and compresses (default 0.2)"},
             {"onebit-refresh", count("N", &s->onebit_refresh, 1, 1000000000),
              "steps between refreshes of the variance (default 32)"},
             {"onebit-bucket", count("BYTES", &s->onebit_bucket, 0, kMostBytes),
              "momentum that travels at once, 4 bytes an element, in the 1-bit arms; 0 makes it all (default "
              "0)"},
             {"onebit-floor", number("SHARE", &s->onebit_floor, 0, 1),
              "share of its tensor's mean variance that elements of 1-bit Adam divide by at least; 0: none "
              "(default 0.01)"},
             {"lamb-max-coeff", number("RATIO", &s->lamb_max_coeff, 0.01, 1e6),
              "the largest trust ratio of lamb and onebit-lamb (default 0.3)"},
             {"lamb-max-factor", number("FACTOR", &s->lamb_max_factor, 1, 1e6),
              "by how much onebit-lamb may raise its steps where its variance would have shrunk, at least 1 "
              "(default 1)"}}),
      group("Fine-tuning",
            {{"fine-tune-data", path("FILE|FOLDER", &s->fine_tune_data),
              "the second text (default: LibTorch's scripts of CMake); its last tenth validates"},
             {"fine-tune-tokens", count("N", &s->fine_tune_tokens, 0, kMostTokens),
              "budget of each arm; 0 makes it a quarter of the base's (default 0)"},
             {"fine-tune-rate", number("RATE", &s->fine_tune_rate, 0, 10),
              "learning rate of the arms at its peak; 0 takes that of the base (default 0)"},
             {"lora-rank", count("N", &s->lora_rank, 1, 65536),
              "of the adapters of lora and qlora; their alpha is twice that (default 8)"}}),
      group(
          "Machine",
          {{"processes", count("N", &s->processes, 0, 1024),
            "ranks that train together, each on its part of every batch and on a GPU of its own where there "
            "is one; 0 takes all GPUs, or on a CPU two where there are two cores (default 1)"},
           {"ranks-per-node", count("N", &s->ranks_per_node, 0, 1024),
            "ranks that the arms by nodes take for one worker; 0 takes those that share a host (default 0)"},
           {"device", choice(&s->device, {"auto", "cpu", "cuda"}),
            "auto takes the GPU where there is one (default auto)"},
           {"precision", choice(&s->precision, {"float32", "tensorfloat32", "bfloat16"}),
            "of all arms: tensorfloat32 rounds the inputs of matrix products on a GPU, bfloat16 runs forward "
            "under autocast (default float32)"},
           {"threads", count("N", &s->threads, 0, 1024),
            "CPU threads; 0 leaves it to LibTorch (default 1 for tiny, 0 for small)"},
           {"output", path("FOLDER", &s->output), "where results go (default run/convergence)"},
           {"checkpoint-every", count("N", &s->checkpoint_every, 0, 1000000000000),
            "steps between checkpoints, which --resume continues from; 0 writes none (default 500)"},
           {"resume", examples::make_switch(&s->resume),
            "take finished runs from the output folder and continue unfinished ones from their newest "
            "checkpoint"}})};
}

}  // namespace convergence
