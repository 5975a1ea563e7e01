// The option keys that all fused optimizers have in LibTorch archives: first those torch's optimizers write,
// then pacer's own. Reading throws InvalidArgument that names the key that is missing or unknown.
#pragma once

#include <cstdint>

#include <torch/serialize/archive.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/adam_options.h>

namespace pacer::detail {

inline c10::IValue read_option(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  require(archive.try_read(key, value), "the archive has no option \"", key, "\"");
  return value;
}

// Reads an enumerator in [0, last].
template <class Enum>
Enum read_enum_option(torch::serialize::InputArchive& archive, const char* key, Enum last) {
  const int64_t number = read_option(archive, key).toInt();
  require(number >= 0 && number <= static_cast<int64_t>(last), "the archive's option \"", key,
          "\" has the unknown value ", number);
  return static_cast<Enum>(number);
}

template <class Options>
void write_rule_options(const Options& options, torch::serialize::OutputArchive& archive) {
  archive.write("lr", c10::IValue(options.lr()));
  archive.write("betas", c10::IValue(options.betas()));
  archive.write("eps", c10::IValue(options.eps()));
  archive.write("weight_decay", c10::IValue(options.weight_decay()));
}

template <class Options>
void read_rule_options(Options& options, torch::serialize::InputArchive& archive) {
  options.lr(read_option(archive, "lr").toDouble());
  options.betas(read_option(archive, "betas").template to<typename Options::betas_t>());
  options.eps(read_option(archive, "eps").toDouble());
  options.weight_decay(read_option(archive, "weight_decay").toDouble());
}

template <class Options>
void write_own_options(const Options& options, torch::serialize::OutputArchive& archive) {
  archive.write("bias_correction", c10::IValue(options.bias_correction()));
  archive.write("finite_check", c10::IValue(options.finite_check()));
  archive.write("master_weights", c10::IValue(static_cast<int64_t>(options.master_weights())));
  archive.write("rounding", c10::IValue(static_cast<int64_t>(options.rounding())));
  archive.write("seed", c10::IValue(static_cast<int64_t>(options.seed())));
  if (options.initial_lr()) archive.write("initial_lr", c10::IValue(*options.initial_lr()));
}

template <class Options>
void read_own_options(Options& options, torch::serialize::InputArchive& archive) {
  options.bias_correction(read_option(archive, "bias_correction").toBool());
  options.finite_check(read_option(archive, "finite_check").toBool());
  options.master_weights(read_enum_option(archive, "master_weights", MasterWeights::none));
  options.rounding(read_enum_option(archive, "rounding", Rounding::stochastic));
  options.seed(static_cast<uint64_t>(read_option(archive, "seed").toInt()));
  c10::IValue value;
  if (archive.try_read("initial_lr", value)) options.initial_lr(value.toDouble());
}

// True if they are the same in all of these.
template <class Options>
bool same_common_options(const Options& a, const Options& b) {
  return a.lr() == b.lr() && a.betas() == b.betas() && a.eps() == b.eps() &&
         a.weight_decay() == b.weight_decay() && a.bias_correction() == b.bias_correction() &&
         a.finite_check() == b.finite_check() && a.master_weights() == b.master_weights() &&
         a.rounding() == b.rounding() && a.seed() == b.seed() && a.initial_lr() == b.initial_lr();
}

}  // namespace pacer::detail
