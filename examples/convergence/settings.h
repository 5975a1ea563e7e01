// Everything a person can choose about the study, as one plain struct, with the presets it starts from and
// the checks that need more than one value at a time. How values arrive (flags, environment, file) is in
// options.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

struct Settings {
  // What is trained, on what.
  std::string preset = "tiny";
  bool quick = false;
  bool fine_tune = false;             // arms go on from a base, see for_fine_tuning
  std::vector<std::string> arms;      // empty: those of the comparison, see arms.h
  std::vector<uint64_t> seeds = {1};  // each arm is trained once per seed
  std::string data;                   // file or folder; empty: the LibTorch headers
  int64_t data_limit = 0;             // bytes read of it at most

  // The model.
  int64_t layers = 0;
  int64_t width = 0;
  int64_t heads = 0;
  int64_t sequence = 0;  // bytes

  // The recipe.
  int64_t batch = 0;              // sequences per step
  int64_t tokens = 0;             // budget of each run
  double learning_rate = 0.0;     // at its peak
  double weight_decay = 0.1;      // on matrices only
  double clip = 1.0;              // global gradient norm; 0 switches clipping off
  std::string clip_by = "exact";  // exact, previous (buckets of compressed steps by the norm before)

  // The methods; each concerns the arms that use it.
  int64_t curriculum_start = 0;   // bytes per sequence; 0: an eighth of the sequence, at least 8
  double curriculum_share = 0.4;  // of the budget, after which sequences have their full length
  double decay_share = 0.2;       // of the budget, over which a stable rate falls in the end
  double average_decay = 0.999;   // of the average of weights, per step
  double layer_drop_theta = 0.5;  // share of layers that the deepest one keeps in the end
  double layer_drop_gamma = 0.0;  // per step, where time is rising; 0: 100 / steps()
  double onebit_freeze = 0.2;     // share of the steps after which 1-bit Adam compresses
  int64_t onebit_refresh = 32;    // steps between refreshes of its variance
  int64_t onebit_bucket = 0;      // bytes of momentum that travel at once, 4 an element; 0: all
  double onebit_floor = 0.01;     // under its variance, in shares of a tensor's mean
  double lamb_max_coeff = 0.3;    // the largest trust ratio of LAMB
  double lamb_max_factor = 1;     // and the largest factor of 1-bit LAMB
  // The shapes of layer dropping: linear, from-zero, uniform or exponential; rising, constant, falling or
  // up-down.
  std::string layer_drop_depth = "linear", layer_drop_time = "rising";

  // Fine-tuning.
  std::string fine_tune_data;    // file or folder; empty: LibTorch's scripts of CMake
  int64_t fine_tune_tokens = 0;  // budget of each arm; 0: a quarter of `tokens`
  double fine_tune_rate = 0.0;   // learning rate at its peak; 0: that of the base
  int64_t lora_rank = 8;

  // Validation.
  int64_t evaluate_every = 0;        // tokens; 0: a sixteenth of the budget
  int64_t validation_sequences = 0;  // at most this many, spread evenly over the validation text

  // The machine.
  int64_t processes = 1;              // ranks, which share every batch; 0: as many as the machine is good for
  int64_t ranks_per_node = 0;         // which 1-bit arms by nodes take for one worker; 0: those of a host
  std::string device = "auto";        // auto, cpu, cuda
  std::string precision = "float32";  // float32, tensorfloat32 (GPU), bfloat16 (autocast)
  int64_t threads = 0;                // 0: LibTorch's choice
  std::string output = "run/convergence";
  int64_t checkpoint_every = 500;  // steps; 0: none
  bool resume = false;

  int64_t tokens_per_step() const { return batch * sequence; }  // at full length
  int64_t steps() const { return (tokens + tokens_per_step() - 1) / tokens_per_step(); }
  int64_t warmup_steps() const;  // of the learning rate
  int64_t tokens_between_evaluations() const;
  int64_t first_length() const;  // of the curriculum
  double gamma() const;          // of layer dropping
  int64_t freeze_step() const;   // of 1-bit Adam

  // With fine_tune, `data`, `tokens` and `learning_rate` are those of a base, which is trained first. These
  // are the settings of the arms, which go on from it: the same with a text, budget and rate of their own.
  Settings for_fine_tuning() const;
};

// Names of the presets with one line of help each.
struct PresetHelp {
  std::string name;
  std::string help;
};
std::vector<PresetHelp> preset_help();

// The settings of a preset; `quick` cuts its budget to what two processor cores train in under a minute per
// arm, `fine_tune` chooses arms for that. Throws pacer::InvalidArgument for an unknown name.
Settings preset_settings(const std::string& name, bool quick, bool fine_tune);

// The checks between values (heads divide width, processes the batch, ...); throws
// pacer::InvalidArgument.
void check_settings(const Settings& settings);

}  // namespace convergence
