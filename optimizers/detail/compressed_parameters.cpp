#include <pacer/optimizers/detail/compressed_parameters.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/collectives/agreement.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/joint_look.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

CompressedParameters::CompressedParameters(const std::vector<OneBitTensor>& tensors, const OneBitSetup& setup,
                                           std::shared_ptr<Communicator> shard_ranks)
    : rule_(setup.rule), device_(setup.route.world().device()), shard_ranks_(std::move(shard_ranks)) {
  for (auto& of_bucket : cut(tensors, setup.first_of_buckets(tensors))) {
    buckets_.push_back(std::make_unique<OneBitBucket>(std::move(of_bucket), setup, shard_ranks_));
  }
  for (const auto& bucket : buckets_) {
    for (size_t i = 0; i < bucket->tensors().size(); ++i) places_.push_back({bucket.get(), i});
  }
  const auto count = static_cast<int64_t>(buckets_.size());
  sums_ = at::zeros({3 + (count > 1 ? count : 0)}, at::TensorOptions().dtype(at::kDouble).device(device_));
}

// From the last bucket to the first, as backward reaches them: while the messages of one travel, the next is
// compressed, and those before are served and update their parameters.
void CompressedParameters::compressed_step(const kernels::StepScalars* scalars,
                                           const kernels::GradientCheck* check) {
  const size_t count = buckets_.size();
  for (size_t turn = 0; turn < count + 2; ++turn) {
    if (turn >= started_ && turn < count) at_turn(turn).start(scalars, check, factor_at(turn));
    if (turn >= served_ + 1 && turn < count + 1) at_turn(turn - 1).serve();
    if (turn >= 2) at_turn(turn - 2).finish(scalars, check);
  }
  started_ = served_ = 0;
}

at::Tensor CompressedParameters::factor_at(size_t turn) const {
  return clipped_.defined() ? clipped_.select(0, static_cast<int64_t>(number_at(turn))) : at::Tensor();
}

// ---- What starts early. ----

size_t CompressedParameters::turn_of(size_t tensor) const {
  size_t turn = 0;
  while (&at_turn(turn) != places_[tensor].bucket) ++turn;
  return turn;
}

std::pair<size_t, size_t> CompressedParameters::tensors_at(size_t turn) const {
  size_t first = 0;
  for (size_t b = 0; b < number_at(turn); ++b) first += buckets_[b]->tensors().size();
  return {first, first + at_turn(turn).tensors().size()};
}

void CompressedParameters::start(size_t turn, const kernels::StepScalars* scalars,
                                 const GradientGuard* guard) {
  at_turn(turn).send();
  if (guard != nullptr) look_at_bucket(number_at(turn), guard);
  at_turn(turn).start(scalars, /*check=*/nullptr, factor_at(turn));
  started_ = turn + 1;
}

// Serves only what has come. Waiting here would block backward, and with it gradients that another rank still
// waits for.
void CompressedParameters::serve() {
  while (served_ < started_ && at_turn(served_).can_serve()) at_turn(served_++).serve();
}

void CompressedParameters::step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  if (step_.kind == OneBitKind::compressed) return compressed_step(scalars, check);
  const bool refresh = step_.kind == OneBitKind::refresh;
  for (const auto& bucket : buckets_) bucket->take_gradients(scalars, check, refresh);
  if (refresh) set_floors(check);
  for (const auto& bucket : buckets_) bucket->update_dense(scalars, check);
}

// ---- What comes before. ----

void CompressedParameters::agree(int64_t step, bool in_lanes) {
  if (has_agreed_) return;
  if (in_lanes) {
    for (const auto& bucket : buckets_) bucket->exchange()->use_lanes();
  }
  Communicator& replicas = buckets_.front()->exchange()->route().replicas();
  std::vector<Fact> all = buckets_.front()->exchange()->facts();
  for (size_t b = 1; b < buckets_.size(); ++b) {
    all.front().value += concatenate("; ", buckets_[b]->exchange()->facts().front().value);
  }
  if (replicas.world_size() > 1) require_agreement(replicas, step, all);
  has_agreed_ = true;
}

void CompressedParameters::begin(const Step& step) {
  for (const auto& bucket : buckets_) bucket->begin(step.attempt, step.refresh_every);
  if (started_ == 0) clipped_ = at::Tensor();
  step_ = step;
}

void CompressedParameters::check_fits(const std::vector<const ParameterEntry*>& entries) const {
  constexpr const char* kSince = " after the variance froze";
  std::vector<const OneBitTensor*> tensors;
  for (const Place& place : places_) tensors.push_back(&place.tensor());
  check_same(entries, tensors, kSince, "add it before, or to a group with compress(false)");
  for (size_t i = 0; i < entries.size(); ++i) {
    const ParameterEntry& entry = *entries[i];
    const at::Tensor variance = places_[i].bucket->variance_of(places_[i].index);
    require(
        entry.state != nullptr && !entry.state->exp_avg().defined() && entry.state->exp_avg_sq().defined() &&
            entry.state->exp_avg_sq().const_data_ptr() == variance.const_data_ptr() &&
            same_layout(entry.state->exp_avg_sq(), variance),
        "the state of parameter ", InMessage{entry.name, entry.parameter.sizes()}, " was replaced or removed",
        kSince,
        ", and what ranks have agreed on would no longer fit; write into its tensors, or load a checkpoint");
  }
}

void CompressedParameters::set_tensor(const ParameterEntry& entry, const void* gradient,
                                      const GroupSettings& settings) {
  const Place& place = places_[entry.position];
  place.bucket->set_tensor(place.index, entry, gradient, settings);
}

void CompressedParameters::prepare(const std::vector<GroupSettings>& settings) {
  for (const auto& bucket : buckets_) bucket->prepare(settings);
}

// Its sum of squares takes its place among the sums; with `clipping` the bucket is clipped by itself.
void CompressedParameters::look_at_bucket(size_t b, const GradientGuard* clipping) {
  double* sum = sums_.mutable_data_ptr<double>() + (buckets_.size() == 1 ? 2 : 3 + b);
  buckets_[b]->sum_of_squares(sum);
  if (clipping == nullptr) return;
  if (!clipped_.defined()) clipped_ = at::empty({static_cast<int64_t>(buckets_.size())}, sums_.options());
  const auto workers = static_cast<double>(buckets_[b]->exchange()->route().workers());
  clipping->early_factor(sum, local_weight(), workers, clipped_.mutable_data_ptr<double>() + b);
}

void CompressedParameters::look(GradientGuard& guard, const double* averaged, int64_t count) {
  const bool is_local = step_.kind == OneBitKind::compressed;
  const bool clips = is_local && guard.clips_by_previous();
  auto* own = sums_.mutable_data_ptr<double>() + 2;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (clips && buckets_.size() - 1 - b < started_) continue;  // it was looked at when it started
    look_at_bucket(b, clips ? &guard : nullptr);
  }
  if (buckets_.size() > 1) add_partials(device_, own + 1, static_cast<int64_t>(buckets_.size()), own);
  const OneBitRoute* const route = is_local ? &buckets_.front()->exchange()->route() : nullptr;
  look_jointly(guard, sums_, route, local_weight(), averaged, count);
}

}  // namespace pacer::detail
