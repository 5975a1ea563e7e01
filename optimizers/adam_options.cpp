#include <pacer/optimizers/adam_options.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>

#include <pacer/core/error.h>

namespace pacer {
namespace {

template <class Options, class TorchOptions>
void copy_from_torch(Options& options, const TorchOptions& source) {
  options.lr(source.lr()).betas(source.betas()).eps(source.eps()).weight_decay(source.weight_decay());
  options.amsgrad(source.amsgrad());
}

// The keys torch::optim::Adam and AdamW write, then pacer's own.
template <class Options>
void write_options(const Options& options, torch::serialize::OutputArchive& archive) {
  archive.write("lr", c10::IValue(options.lr()));
  archive.write("betas", c10::IValue(options.betas()));
  archive.write("eps", c10::IValue(options.eps()));
  archive.write("weight_decay", c10::IValue(options.weight_decay()));
  archive.write("amsgrad", c10::IValue(options.amsgrad()));
  archive.write("bias_correction", c10::IValue(options.bias_correction()));
  archive.write("finite_check", c10::IValue(options.finite_check()));
  archive.write("master_weights", c10::IValue(static_cast<int64_t>(options.master_weights())));
  archive.write("rounding", c10::IValue(static_cast<int64_t>(options.rounding())));
  archive.write("seed", c10::IValue(static_cast<int64_t>(options.seed())));
  if (options.initial_lr()) archive.write("initial_lr", c10::IValue(*options.initial_lr()));
}

c10::IValue read(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  require(archive.try_read(key, value), "the archive has no option \"", key, "\"");
  return value;
}

// Reads an enumerator in [0, last].
template <class Enum>
Enum read_enum(const c10::IValue& value, Enum last, const char* key) {
  const int64_t number = value.toInt();
  require(number >= 0 && number <= static_cast<int64_t>(last), "the archive's option \"", key,
          "\" has the unknown value ", number);
  return static_cast<Enum>(number);
}

template <class Options>
void read_options(Options& options, torch::serialize::InputArchive& archive) {
  options.lr(read(archive, "lr").toDouble());
  options.betas(read(archive, "betas").template to<typename Options::betas_t>());
  options.eps(read(archive, "eps").toDouble());
  options.weight_decay(read(archive, "weight_decay").toDouble());
  options.amsgrad(read(archive, "amsgrad").toBool());
  c10::IValue value;
  if (!archive.try_read("bias_correction", value)) return;  // written by torch's optimizer
  options.bias_correction(value.toBool());
  options.finite_check(read(archive, "finite_check").toBool());
  options.master_weights(read_enum(read(archive, "master_weights"), MasterWeights::none, "master_weights"));
  options.rounding(read_enum(read(archive, "rounding"), Rounding::stochastic, "rounding"));
  options.seed(static_cast<uint64_t>(read(archive, "seed").toInt()));
  if (archive.try_read("initial_lr", value)) options.initial_lr(value.toDouble());
}

template <class Options>
bool equal(const Options& a, const Options& b) {
  return a.lr() == b.lr() && a.betas() == b.betas() && a.eps() == b.eps() &&
         a.weight_decay() == b.weight_decay() && a.amsgrad() == b.amsgrad() &&
         a.bias_correction() == b.bias_correction() && a.finite_check() == b.finite_check() &&
         a.master_weights() == b.master_weights() && a.rounding() == b.rounding() && a.seed() == b.seed() &&
         a.initial_lr() == b.initial_lr();
}

}  // namespace

FusedAdamOptions::FusedAdamOptions(const torch::optim::AdamOptions& options) {
  copy_from_torch(*this, options);
}
FusedAdamWOptions::FusedAdamWOptions(const torch::optim::AdamWOptions& options) {
  copy_from_torch(*this, options);
}

void FusedAdamOptions::serialize(torch::serialize::InputArchive& archive) { read_options(*this, archive); }
void FusedAdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(*this, archive);
}
void FusedAdamWOptions::serialize(torch::serialize::InputArchive& archive) { read_options(*this, archive); }
void FusedAdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(*this, archive);
}

bool operator==(const FusedAdamOptions& left, const FusedAdamOptions& right) { return equal(left, right); }
bool operator==(const FusedAdamWOptions& left, const FusedAdamWOptions& right) { return equal(left, right); }

}  // namespace pacer
