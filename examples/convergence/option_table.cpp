// The options themselves. Values are parsed strictly: the whole text, in range, and finite.
#include "option_table.h"

#include <algorithm>
#include <array>

#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/option_table.h>

#include "value_parsers.h"

namespace convergence {
namespace {

using Text = const std::string&;

// What most studies need; --help shows these, --help-all every option.
constexpr std::array<const char*, 12> kShortHelp = {"preset",    "quick",  "fine-tune", "arms",
                                                    "seeds",     "tokens", "data",      "learning-rate",
                                                    "processes", "device", "output",    "resume"};

Option count(std::string name, std::string value, std::string help, int64_t Settings::*member,
             CountRange range) {
  return {std::move(name), std::move(value), std::move(help),
          [member, range](Settings& settings, Text text) { settings.*member = parse_count(text, range); },
          [member](const Settings& settings) { return std::to_string(settings.*member); }};
}

Option number(std::string name, std::string value, std::string help, double Settings::*member,
              NumberRange range) {
  return {std::move(name), std::move(value), std::move(help),
          [member, range](Settings& settings, Text text) { settings.*member = parse_number(text, range); },
          [member](const Settings& settings) { return show_number(settings.*member); }};
}

Option text(std::string name, std::string value, std::string help, std::string Settings::*member) {
  return {std::move(name), std::move(value), std::move(help),
          [member](Settings& settings, Text text) { settings.*member = parse_text(text); },
          [member](const Settings& settings) { return settings.*member; }};
}

Option choice(std::string name, std::string help, std::string Settings::*member,
              const std::vector<std::string>& choices) {
  std::string value;
  for (const auto& one : choices) value += (value.empty() ? "" : "|") + one;
  return {
      std::move(name), std::move(value), std::move(help),
      [member, choices](Settings& settings, Text text) { settings.*member = parse_choice(text, choices); },
      [member](const Settings& settings) { return settings.*member; }};
}

OptionGroup study_options(const std::vector<std::string>& arm_names) {
  std::vector<std::string> presets;
  for (const auto& preset : preset_help()) presets.push_back(preset.name);
  // The preset, quick and fine-tune are applied before every other option (see options.cpp); here they are
  // only checked.
  Option quick{"quick", "", "a short run on real text: the preset with a smaller budget",
               [](Settings& settings, Text text) { settings.quick = parse_switch(text); },
               [](const Settings& settings) { return std::string(settings.quick ? "true" : "false"); }};
  Option tuning{"fine-tune", "",
                "first train a base as fused-adamw is trained, then let the arms go on from it on a second "
                "text",
                [](Settings& settings, Text text) { settings.fine_tune = parse_switch(text); },
                [](const Settings& settings) { return std::string(settings.fine_tune ? "true" : "false"); }};
  Option arms{
      "arms", "NAME,NAME",
      "the arms to train, the first is the one others are compared with; --list names all of them, and "
      "those that are trained where none is named",
      [arm_names](Settings& settings, Text text) { settings.arms = parse_names(text, arm_names); },
      [](const Settings& settings) { return join(settings.arms); }};
  Option seeds{"seeds", "N,N", "train every arm once per seed; two or more give standard errors (default 1)",
               [](Settings& settings, Text text) { settings.seeds = parse_seeds(text); },
               [](const Settings& settings) { return join(settings.seeds); }};
  return {"Study",
          {choice("preset", "where all values below start from (default tiny)", &Settings::preset, presets),
           std::move(quick), std::move(tuning), std::move(arms), std::move(seeds),
           count("tokens", "N",
                 "training budget of each run in tokens (bytes of text); 2M and 500k are understood (default "
                 "1M for tiny, "
                 "50M for small)",
                 &Settings::tokens, {1, 1000000000000000}),
           count("evaluate-every", "N", "tokens between validations; 0 makes it a sixteenth of the budget",
                 &Settings::evaluate_every, {0, 1000000000000000}),
           count("validation-sequences", "N", "sequences per validation, the same ones every time",
                 &Settings::validation_sequences, {1, 1000000})}};
}

}  // namespace

std::vector<OptionGroup> option_groups(const std::vector<std::string>& arm_names) {
  std::vector<OptionGroup> groups;
  groups.push_back(study_options(arm_names));
  groups.push_back(
      {"Text",
       {text("data", "FILE|FOLDER",
             "the text to train on (default: LibTorch's own headers); the last tenth validates",
             &Settings::data),
        count("data-limit", "N", "bytes of it to read at most", &Settings::data_limit, {1, 1000000000000})}});
  groups.push_back(
      {"Model",
       {count("layers", "N", "transformer blocks", &Settings::layers, {1, 1000}),
        count("width", "N", "features per position", &Settings::width, {1, 65536}),
        count("heads", "N", "attention heads; must divide the width", &Settings::heads, {1, 1024}),
        count("sequence", "N", "bytes per sequence", &Settings::sequence, {2, 65536})}});
  groups.push_back(
      {"Recipe",
       {number("learning-rate", "RATE",
               "its peak: linear warm-up over 5 % of the steps, then a cosine over the tokens to a tenth "
               "(default 3e-3 for tiny, 6e-4 for small)",
               &Settings::learning_rate, {0.0, 10.0, /*minimum_allowed=*/false}),
        number("weight-decay", "RATE",
               "decoupled decay of the matrices; vectors are never decayed (default 0.1)",
               &Settings::weight_decay, {0.0, 10.0}),
        number("clip", "NORM", "largest global gradient norm; 0 switches clipping off (default 1)",
               &Settings::clip, {0.0, 1e9}),
        choice("clip-by",
               "exact clips by the norm of the step itself; with previous a 1-bit arm's compressed steps are "
               "clipped by that of the step before, as buckets that travel behind backward need it (default "
               "exact)",
               &Settings::clip_by, {"exact", "previous"}),
        count("batch", "N", "sequences per step", &Settings::batch, {1, 65536})}});
  groups.push_back(
      {"Methods",
       {count("curriculum-start", "N",
              "bytes per sequence at the start of a curriculum; 0 makes it an eighth of the sequence, at "
              "least 8 (default 0)",
              &Settings::curriculum_start, {0, 65536}),
        number("curriculum-share", "SHARE",
               "share of the budget after which sequences have their full length (default 0.4)",
               &Settings::curriculum_share, {0.0, 1.0}),
        number("layer-drop-theta", "SHARE", "how often the deepest layer is kept in the end (default 0.5)",
               &Settings::layer_drop_theta, {0.0, 1.0, /*minimum_allowed=*/false}),
        number("layer-drop-gamma", "RATE",
               "how fast that is reached, per step; 0 makes it 100 / steps (default 0)",
               &Settings::layer_drop_gamma, {0.0, 1e6}),
        number("onebit-freeze", "SHARE",
               "share of the steps after which 1-bit Adam freezes its variance and compresses (default 0.2)",
               &Settings::onebit_freeze, {0.0, 1.0, /*minimum_allowed=*/false}),
        count("onebit-refresh", "N", "steps between refreshes of the variance (default 32)",
              &Settings::onebit_refresh, {1, 1000000000}),
        count("onebit-bucket", "BYTES",
              "momentum that travels at once, 4 bytes an element, in the 1-bit arms; 0 makes it all (default "
              "0)",
              &Settings::onebit_bucket, {0, 1000000000000}),
        number("onebit-floor", "SHARE",
               pacer::option_help<pacer::OneBitAdamOptions>("variance_floor") + " (default 0.01)",
               &Settings::onebit_floor, {0.0, 1.0}),
        number("lamb-max-coeff", "RATIO", "the largest trust ratio of lamb and onebit-lamb (default 0.3)",
               &Settings::lamb_max_coeff, {0.01, 1e6}),
        number("lamb-max-factor", "FACTOR",
               "by how much onebit-lamb may raise its steps where its variance would have shrunk, at least 1 "
               "(default 1)",
               &Settings::lamb_max_factor, {1.0, 1e6})}});
  groups.push_back(
      {"Fine-tuning",
       {text("fine-tune-data", "FILE|FOLDER",
             "the second text (default: LibTorch's scripts of CMake); its last tenth validates",
             &Settings::fine_tune_data),
        count("fine-tune-tokens", "N", "budget of each arm; 0 makes it a quarter of the base's (default 0)",
              &Settings::fine_tune_tokens, {0, 1000000000000000}),
        number("fine-tune-rate", "RATE",
               "learning rate of the arms at its peak; 0 takes that of the base (default 0)",
               &Settings::fine_tune_rate, {0.0, 10.0}),
        count("lora-rank", "N", "of the adapters of lora and qlora; their alpha is twice that (default 8)",
              &Settings::lora_rank, {1, 65536})}});
  // A study's settings.ini shows it as unset: who repeats a study does not want its stored results.
  Option resume{"resume", "",
                "take finished runs from the output folder and continue unfinished ones from their newest "
                "checkpoint",
                [](Settings& settings, Text text) { settings.resume = parse_switch(text); },
                [](const Settings&) { return std::string(); }};
  groups.push_back(
      {"Machine",
       {count("processes", "N",
              "ranks that train together, each on its part of every batch and on a GPU of its own where "
              "there is "
              "one; 0 takes all GPUs, or on a CPU two where there are two cores (default 1)",
              &Settings::processes, {0, 1024}),
        count("ranks-per-node", "N",
              "ranks that the arms by nodes take for one worker; 0 takes those that share a host (default 0)",
              &Settings::ranks_per_node, {0, 1024}),
        choice("device", "auto takes the GPU where there is one (default auto)", &Settings::device,
               {"auto", "cpu", "cuda"}),
        choice(
            "precision",
            "of all arms: tensorfloat32 rounds the inputs of matrix products on a GPU, bfloat16 runs forward "
            "under autocast (default float32)",
            &Settings::precision, {"float32", "tensorfloat32", "bfloat16"}),
        count("threads", "N", "CPU threads; 0 leaves it to LibTorch (default 1 for tiny, 0 for small)",
              &Settings::threads, {0, 1024}),
        text("output", "FOLDER", "where results go (default run/convergence)", &Settings::output),
        count("checkpoint-every", "N",
              "steps between checkpoints, which --resume continues from; 0 writes none (default 500)",
              &Settings::checkpoint_every, {0, 1000000000000}),
        std::move(resume)}});
  for (auto& group : groups) {
    for (auto& option : group.options) {
      option.in_short_help = std::find(kShortHelp.begin(), kShortHelp.end(), option.name) != kShortHelp.end();
    }
  }
  return groups;
}

std::string environment_name(const std::string& option) {
  std::string name = "PACER_";
  for (const char c : option)
    name += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

}  // namespace convergence
