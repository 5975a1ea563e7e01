#include <pacer/optimizers/detail/compressed_parameters.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/collectives/agreement.h>
#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/norm.h>
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
  constexpr const char* kAdvice =
      " after the variance froze, and what ranks have agreed on would no longer fit; ";
  for (size_t i = 0; i < std::min(entries.size(), places_.size()); ++i) {
    const ParameterEntry& entry = *entries[i];
    const OneBitTensor& tensor = places_[i].tensor();
    const at::Tensor& parameter = entry.parameter;
    const InMessage called{entry.name, parameter.sizes()};
    require(entry.name == tensor.name, "parameter ", called, " took the place of ", InMessage{tensor.name},
            kAdvice, "leave the list of parameters as it was");
    require(entry.storage == tensor.storage, "parameter ", called, " changed its dtype (it is ",
            parameter.scalar_type(), " now) or its master weights", kAdvice,
            "change it back, or load a checkpoint");
    const bool fits = entry.range.is_part()
                          ? entry.range.count == tensor.count
                          : parameter.sizes() == at::IntArrayRef(tensor.sizes) &&
                                same_strides(parameter.strides(), tensor.strides, tensor.sizes);
    require(fits, "parameter ", called, " changed its shape or memory order (sizes ", parameter.sizes(),
            ", strides ", parameter.strides(), " now)", kAdvice, "change it back, or load a checkpoint");
    const at::Tensor variance = places_[i].bucket->variance_of(places_[i].index);
    require(entry.state != nullptr && !entry.state->exp_avg().defined() &&
                entry.state->exp_avg_sq().defined() &&
                entry.state->exp_avg_sq().const_data_ptr() == variance.const_data_ptr() &&
                same_layout(entry.state->exp_avg_sq(), variance),
            "the state of parameter ", called, " was replaced or removed", kAdvice,
            "write into its tensors, or load a checkpoint");
  }
  const size_t count = places_.size();
  const std::string added = entries.size() > count ? entries[count]->name : "";
  const std::string removed = entries.size() < count ? places_[entries.size()].tensor().name : "";
  require(entries.size() <= count, "parameter ", InMessage{added}, " was added", kAdvice,
          "add it before, or to a group with compress(false)");
  require(entries.size() >= count, "parameter ", InMessage{removed}, " was removed", kAdvice,
          "to stop training it, say requires_grad_(false)");
}

void CompressedParameters::set_tensor(const ParameterEntry& entry, const void* gradient,
                                      const GroupSettings& settings) {
  const Place& place = places_[entry.position];
  place.bucket->set_tensor(place.index, entry, gradient, settings);
}

void CompressedParameters::prepare(const std::vector<GroupSettings>& settings) {
  for (const auto& bucket : buckets_) bucket->prepare(settings);
}

// One number of each worker, on this rank's device.
at::Tensor CompressedParameters::sums_of_workers(const at::Tensor& own) const {
  const OneBitRoute& route = buckets_.front()->exchange()->route();
  const int64_t workers = route.workers();
  if (workers == 1) return own;
  Communicator& replicas = route.replicas();
  const at::Tensor all = at::empty({replicas.world_size()}, own.options());
  const auto agreed = CollectiveOptions().agreed(true);
  (own.is_cuda() ? replicas.all_gather(all, own, agreed) : replicas.all_gather_host(all, own)).wait();
  return all.view({workers, -1}).select(1, 0).contiguous();  // the ranks of a worker have the same
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
  const kernels::Stream stream = device_.is_cuda() ? current_stream(device_) : nullptr;
  const auto add_up = [&](const double* partials, int64_t number, double* sum) {
    if (device_.is_cuda()) return kernels::sum_partials_cuda(partials, number, sum, stream);
    *sum = sum_partials(partials, number);
  };
  const bool is_local = step_.kind == OneBitKind::compressed;
  const bool clips = is_local && guard.clips_by_previous();
  sums_.narrow(0, 0, 1).zero_();
  auto* of_others = sums_.mutable_data_ptr<double>();
  double *total = of_others + 1, *own = of_others + 2;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (clips && buckets_.size() - 1 - b < started_) continue;  // it was looked at when it started
    look_at_bucket(b, clips ? &guard : nullptr);
  }
  if (buckets_.size() > 1) add_up(own + 1, static_cast<int64_t>(buckets_.size()), own);
  const int64_t workers = is_local ? buckets_.front()->exchange()->route().workers() : 1;
  const at::Tensor own_sum = sums_.narrow(0, 2, 1);
  const at::Tensor all = is_local ? sums_of_workers(own_sum) : own_sum;
  const double weight = local_weight() / static_cast<double>(workers);
  const auto* of_workers = all.const_data_ptr<double>();
  if (count > 0) add_up(averaged, count, of_others);
  if (device_.is_cuda()) {
    kernels::joint_sum_of_squares_cuda(of_workers, workers, weight, of_others, total, stream);
  } else {
    *total = kernels::joint_sum_of_squares(of_workers, workers, weight, *of_others);
  }
  guard.look(total, 1);
}

}  // namespace pacer::detail
