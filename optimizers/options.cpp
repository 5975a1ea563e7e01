// What every options struct does with its fields, from their tables.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer {

template <class Own, class Torch>
void AdamOptionsOf<Own, Torch>::take(const Torch& torch) {
  this->lr(torch.lr()).betas(torch.betas()).eps(torch.eps());
  this->weight_decay(torch.weight_decay()).amsgrad(torch.amsgrad());
}

void FusedSgdOptions::take(const torch::optim::SGDOptions& torch) {
  lr(torch.lr()).momentum(torch.momentum()).dampening(torch.dampening());
  weight_decay(torch.weight_decay()).nesterov(torch.nesterov());
}

template <class Own>
MuonOptionsOf<Own>::MuonOptionsOf(const FusedAdamWOptions& options) : MuonOptionsOf(options.lr()) {
  orthogonalize(false).betas(options.betas()).eps(options.eps()).weight_decay(options.weight_decay());
  this->initial_lr(options.initial_lr()).bias_correction(options.bias_correction());
  this->finite_check(options.finite_check()).master_weights(options.master_weights());
  this->rounding(options.rounding()).seed(options.seed()).paged(options.paged());
  this->amsgrad_ = options.amsgrad();  // refused with the others that it does not have
}

template <class Own>
void FusedOptionsOf<Own>::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(static_cast<Own&>(*this), archive);
}
template <class Own>
void FusedOptionsOf<Own>::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(static_cast<const Own&>(*this), archive);
}

void FusedSgdOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(*this, archive);
}
void FusedSgdOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(*this, archive);
}

bool operator==(const FusedSgdOptions& left, const FusedSgdOptions& right) {
  return detail::equal_options(left, right);
}

void FusedRmspropOptions::take(const torch::optim::RMSpropOptions& torch) {
  lr(torch.lr()).alpha(torch.alpha()).eps(torch.eps()).weight_decay(torch.weight_decay());
  momentum(torch.momentum()).centered(torch.centered());
}
void FusedRmspropOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(*this, archive);
}
void FusedRmspropOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(*this, archive);
}
bool operator==(const FusedRmspropOptions& left, const FusedRmspropOptions& right) {
  return detail::equal_options(left, right);
}

template <class Own>
bool operator==(const OptimizerOptionsOf<Own>& left, const OptimizerOptionsOf<Own>& right) {
  return detail::equal_options(static_cast<const Own&>(left), static_cast<const Own&>(right));
}

template struct AdamOptionsOf<FusedAdamOptions, torch::optim::AdamOptions>;
template struct AdamOptionsOf<FusedAdamWOptions, torch::optim::AdamWOptions>;
template struct FusedOptionsOf<FusedAdamOptions>;
template struct FusedOptionsOf<FusedAdamWOptions>;
template struct FusedOptionsOf<FusedLambOptions>;
template struct FusedOptionsOf<MuonOptions>;
template struct FusedOptionsOf<OneBitMuonOptions>;
template struct FusedOptionsOf<OwnRuleOptions>;
template struct FusedOptionsOf<ScheduleFreeAdamWOptions>;
template struct MuonOptionsOf<MuonOptions>;
template struct MuonOptionsOf<OneBitMuonOptions>;

template bool operator==(const OptimizerOptionsOf<FusedAdamOptions>&,
                         const OptimizerOptionsOf<FusedAdamOptions>&);
template bool operator==(const OptimizerOptionsOf<FusedAdamWOptions>&,
                         const OptimizerOptionsOf<FusedAdamWOptions>&);
template bool operator==(const OptimizerOptionsOf<FusedLambOptions>&,
                         const OptimizerOptionsOf<FusedLambOptions>&);
template bool operator==(const OptimizerOptionsOf<MuonOptions>&, const OptimizerOptionsOf<MuonOptions>&);
template bool operator==(const OptimizerOptionsOf<OneBitMuonOptions>&,
                         const OptimizerOptionsOf<OneBitMuonOptions>&);
template bool operator==(const OptimizerOptionsOf<OwnRuleOptions>&,
                         const OptimizerOptionsOf<OwnRuleOptions>&);
template bool operator==(const OptimizerOptionsOf<ScheduleFreeAdamWOptions>&,
                         const OptimizerOptionsOf<ScheduleFreeAdamWOptions>&);
template bool operator==(const OptimizerOptionsOf<OneBitAdamOptions>&,
                         const OptimizerOptionsOf<OneBitAdamOptions>&);
template bool operator==(const OptimizerOptionsOf<OneBitLambOptions>&,
                         const OptimizerOptionsOf<OneBitLambOptions>&);

}  // namespace pacer
