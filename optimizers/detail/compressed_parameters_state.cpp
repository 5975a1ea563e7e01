// How CompressedParameters begin, what they are rebuilt from, what they save, and what they say of
// themselves.
#include <cmath>

#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

template <class F>
void CompressedParameters::for_buckets(const OneBitStates& states, const F& f) const {
  auto first = states.begin();
  for (const auto& bucket : buckets_) {
    const auto end = first + static_cast<int64_t>(bucket->tensors().size());
    f(*bucket, OneBitStates(first, end));
    first = end;
  }
}

bool CompressedParameters::freeze(const OneBitStates& states, const std::vector<GroupSettings>& settings) {
  const c10::DeviceGuard guard(device_);
  for_buckets(states, [&](OneBitBucket& bucket, const OneBitStates& of_bucket) {
    bucket.take_moments(of_bucket, settings);
  });
  set_floors();
  const auto [sum, elements] = sum_and_count_of_variance();
  if (elements > 0 && !(sum.item<double>() > 0)) return false;
  std::vector<OneBitTensor> tensors;
  for (const auto& bucket : buckets_) {
    tensors.insert(tensors.end(), bucket->tensors().begin(), bucket->tensors().end());
  }
  give_unstepped_counts(tensors, states);
  for_buckets(states, [&](OneBitBucket& bucket, const OneBitStates& of_bucket) {
    bucket.take_over(of_bucket, settings);
  });
  return true;
}

void CompressedParameters::go_on(const OneBitStates& states, NamedTensors errors, int64_t errors_version,
                                 NamedTensors of_rule) {
  const c10::DeviceGuard guard(device_);
  for_buckets(states, [&](OneBitBucket& bucket, const OneBitStates& of_bucket) {
    bucket.go_on(of_bucket, errors, errors_version, of_rule);
  });
  require_all_loaded(
      errors,
      "\", which this rank does not need; resume with as many ranks, the same parameters and options");
  require_all_loaded(of_rule,
                     rule_ == kernels::UpdateRule::lamb
                         ? "\", which fits no compressed parameter; build the same parameters and options"
                         : "\", which only OneBitLamb has; load it into one");
}

std::pair<at::Tensor, int64_t> CompressedParameters::sum_and_count_of_variance() const {
  at::Tensor sum = buckets_.front()->sum_of_variance();
  int64_t count = buckets_.front()->elements();
  for (size_t b = 1; b < buckets_.size(); ++b) {
    sum = sum.add(buckets_[b]->sum_of_variance());
    count += buckets_[b]->elements();
  }
  return {sum, count};
}

// Tensors without any variance get the floor of all buckets.
void CompressedParameters::set_floors(const kernels::GradientCheck* check) {
  const c10::DeviceGuard guard(device_);
  for (const auto& bucket : buckets_) bucket->set_floors(check);
  const auto [sum, count] = sum_and_count_of_variance();
  if (buckets_.size() == 1 || count == 0) return;
  const at::Tensor mean = sum.div(count);
  for (const auto& bucket : buckets_) bucket->raise_floors(mean);
}

int64_t CompressedParameters::bytes_sent() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) bytes += compresses() ? bucket->exchange()->bytes_sent() : 0;
  return bytes;
}

double CompressedParameters::compression_error() const {
  if (!compresses()) return 0;
  double lost = 0, sent = 0;
  for (const auto& bucket : buckets_) {
    const auto [lost_here, sent_here] = bucket->lost_and_sent();
    lost += lost_here;
    sent += sent_here;
  }
  return sent == 0 ? 0 : std::sqrt(lost / sent);
}

OneBitLambKernels::Numbers CompressedParameters::lamb_numbers(const std::string& name) const {
  for (const Place& place : places_) {
    if (place.tensor().name == name) return place.bucket->lamb_numbers(place.index);
  }
  return {};
}

void CompressedParameters::rename(const std::vector<std::string>& names) {
  for (size_t i = 0; i < places_.size() && i < names.size(); ++i) {
    places_[i].bucket->rename(places_[i].index, names[i]);
  }
}

std::string CompressedParameters::describe_floors() const {
  std::vector<at::Tensor> below;
  for (const Place& place : places_) below.push_back(place.bucket->floored(place.index));
  if (below.empty()) return "";
  at::Tensor counts = at::stack(below);
  if (shard_ranks_) shard_ranks_->all_reduce(counts, CollectiveOptions().agreed(true)).wait();
  counts = counts.cpu();
  int64_t all = 0, floored = 0;
  double worst = 0;
  size_t which = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const int64_t count = whole_count(places_[i].tensor());
    if (count == 0) continue;
    const int64_t of_entry = counts.const_data_ptr<int64_t>()[i];
    all += count;
    floored += of_entry;
    const double share = static_cast<double>(of_entry) / static_cast<double>(count);
    if (share > worst) {
      worst = share;
      which = i;
    }
  }
  const auto percent = [](double share) { return std::llround(share * 100); };
  if (percent(worst) == 0) return "";
  return concatenate(percent(static_cast<double>(floored) / static_cast<double>(all)),
                     " % of the elements have less variance than their tensor's floor (most in ",
                     InMessage{places_[which].tensor().name, places_[which].tensor().sizes}, ": ",
                     percent(worst), " %)");
}

}  // namespace pacer::detail
