// What every options struct does with its fields, from their tables.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

template <class Own, class Torch>
void take_from(const Torch& torch, Own& own) {
  own.lr(torch.lr()).betas(torch.betas()).eps(torch.eps());
  own.weight_decay(torch.weight_decay()).amsgrad(torch.amsgrad());
}

}  // namespace

FusedAdamOptions::FusedAdamOptions(const torch::optim::AdamOptions& options) { take(options); }
FusedAdamWOptions::FusedAdamWOptions(const torch::optim::AdamWOptions& options) { take(options); }
void FusedAdamOptions::take(const torch::optim::AdamOptions& torch) { take_from(torch, *this); }
void FusedAdamWOptions::take(const torch::optim::AdamWOptions& torch) { take_from(torch, *this); }

void FusedAdamOptions::serialize(InputArchive& archive) { detail::read_options(*this, archive); }
void FusedAdamOptions::serialize(OutputArchive& archive) const { detail::write_options(*this, archive); }
void FusedAdamWOptions::serialize(InputArchive& archive) { detail::read_options(*this, archive); }
void FusedAdamWOptions::serialize(OutputArchive& archive) const { detail::write_options(*this, archive); }
void FusedLambOptions::serialize(InputArchive& archive) { detail::read_options(*this, archive); }
void FusedLambOptions::serialize(OutputArchive& archive) const { detail::write_options(*this, archive); }

bool operator==(const FusedAdamOptions& a, const FusedAdamOptions& b) { return detail::equal_options(a, b); }
bool operator==(const FusedAdamWOptions& a, const FusedAdamWOptions& b) {
  return detail::equal_options(a, b);
}
bool operator==(const FusedLambOptions& a, const FusedLambOptions& b) { return detail::equal_options(a, b); }
bool operator==(const OneBitAdamOptions& a, const OneBitAdamOptions& b) {
  return detail::equal_options(a, b);
}
bool operator==(const OneBitLambOptions& a, const OneBitLambOptions& b) {
  return detail::equal_options(a, b);
}

}  // namespace pacer
