#include <pacer/optimizers/adam_options.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>

#include <pacer/optimizers/detail/option_archive.h>

namespace pacer {
namespace {

template <class Options, class TorchOptions>
void copy_from_torch(Options& options, const TorchOptions& source) {
  options.lr(source.lr()).betas(source.betas()).eps(source.eps()).weight_decay(source.weight_decay());
  options.amsgrad(source.amsgrad());
}

template <class Options>
void write_options(const Options& options, torch::serialize::OutputArchive& archive) {
  detail::write_rule_options(options, archive);
  archive.write("amsgrad", c10::IValue(options.amsgrad()));
  detail::write_own_options(options, archive);
}

template <class Options>
void read_options(Options& options, torch::serialize::InputArchive& archive) {
  detail::read_rule_options(options, archive);
  options.amsgrad(detail::read_option(archive, "amsgrad").toBool());
  c10::IValue value;
  if (!archive.try_read("bias_correction", value)) return;  // written by torch's optimizer
  detail::read_own_options(options, archive);
}

template <class Options>
bool equal(const Options& a, const Options& b) {
  return detail::same_common_options(a, b) && a.amsgrad() == b.amsgrad();
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
