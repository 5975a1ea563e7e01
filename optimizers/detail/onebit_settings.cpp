#include <pacer/optimizers/detail/onebit_settings.h>

#include <algorithm>
#include <map>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {
namespace {

// Whether momentum travels alike, and, if asked for, the variance freezes alike, too.
bool are_alike(const OneBitGroupSettings& left, const OneBitGroupSettings& right, bool with_freeze) {
  bool equal = true;
  const auto compare = [&](const OptionField&, const auto& a, const auto& b) { equal = equal && a == b; };
  if (with_freeze) visit_freeze_options(compare, left, right);
  visit_exchange_options(compare, left, right);
  return equal;
}

}  // namespace

bool OneBitSettings::exchanges_like(const OneBitSettings& earlier) const {
  return are_alike(*this, earlier, /*with_freeze=*/false) && compressed.size() >= earlier.compressed.size() &&
         std::equal(earlier.compressed.begin(), earlier.compressed.end(), compressed.begin());
}

OneBitSettings onebit_settings(const char* optimizer, const std::vector<GroupSettings>& settings) {
  OneBitSettings onebit;
  if (settings.empty()) return onebit;
  static_cast<OneBitGroupSettings&>(onebit) = settings.front().onebit;
  for (size_t g = 1; g < settings.size(); ++g) {
    require(are_alike(settings[g].onebit, onebit, /*with_freeze=*/true), optimizer, ": group ", g,
            " and group 0 differ in when to freeze or how to compress; only the options of the step itself, "
            "master weights and compress belong to a group");
  }
  require(onebit.freeze_step().has_value() != onebit.freeze_automatically().has_value(), optimizer,
          ": say when the variance freezes: either freeze_step(number of warm-up steps) or "
          "freeze_automatically(steps planned in all)");
  require(
      onebit.freeze_step().value_or(1) >= 1, optimizer,
      ": freeze_step must be at least 1 step, because a variance has to be seen before it can freeze; not ",
      onebit.freeze_step().value_or(1));
  require(onebit.refresh_variance_every() >= 0, optimizer,
          ": refresh_variance_every must be >= 0 steps, not ", onebit.refresh_variance_every());
  require(onebit.variance_floor() >= 0 && onebit.variance_floor() <= 1, optimizer,
          ": variance_floor must be between 0 and 1, not ", onebit.variance_floor());
  require(onebit.bucket_bytes().value_or(1) >= 1, optimizer, ": bucket_bytes must be at least 1 byte, not ",
          onebit.bucket_bytes().value_or(1));
  require(
      !onebit.overlap_backward() || !onebit.hierarchical(), optimizer,
      ": overlap_backward(true) sends momentum while backward runs, but with hierarchical(true) the ranks of "
      "a node first average all gradients; use one of them");
  for (size_t g = settings.size(); g-- > 0;) {
    if (settings[g].onebit.compress()) {
      onebit.beta2 = settings[g].kernel.beta2;
      onebit.bias_correction = settings[g].kernel.bias_correction != 0;
    }
  }
  for (const GroupSettings& group : settings) onebit.compressed.push_back(group.onebit.compress());
  return onebit;
}

std::vector<int64_t> first_of_buckets(const std::vector<OneBitTensor>& tensors,
                                      const std::optional<int64_t>& bytes) {
  std::vector<int64_t> first = {0};
  int64_t elements = 0;  // of the last bucket so far
  for (size_t i = 0; bytes && i < tensors.size(); ++i) {
    if (elements >= (*bytes + 3) / 4) {
      first.push_back(static_cast<int64_t>(i));
      elements = 0;
    }
    elements += whole_count(tensors[i]);
  }
  return first;
}

std::vector<std::vector<OneBitTensor>> cut(const std::vector<OneBitTensor>& tensors,
                                           const std::vector<int64_t>& first_of_buckets) {
  std::vector<std::vector<OneBitTensor>> buckets;
  auto end = tensors.end();
  for (size_t b = first_of_buckets.size(); b-- > 0;) {
    const auto begin = tensors.begin() + first_of_buckets[b];
    buckets.insert(buckets.begin(), std::vector<OneBitTensor>(begin, end));
    end = begin;
  }
  return buckets;
}

std::vector<int64_t> counts_of(const std::vector<OneBitTensor>& tensors) {
  std::vector<int64_t> counts;
  for (const OneBitTensor& tensor : tensors) counts.push_back(tensor.count);
  return counts;
}

std::vector<std::vector<int64_t>> bounds_of(const std::vector<OneBitTensor>& tensors) {
  std::vector<std::vector<int64_t>> bounds;
  for (const OneBitTensor& tensor : tensors) bounds.push_back(tensor.bounds);
  return bounds;
}

std::vector<OneBitTensor> onebit_tensors(const OptimizerView& optimizer,
                                         const std::vector<GroupSettings>& settings, bool whole) {
  std::vector<OneBitTensor> tensors;
  for (const auto& [tensor, group, index, name] : optimizer.parameters()) {
    if (!settings[group].compresses(tensor)) continue;
    tensors.push_back(
        {name, group, tensor.sizes().vec(), tensor.strides().vec(), tensor.numel(),
         storage_for(tensor.scalar_type(), settings[group].master_weights, Rounding::nearest, name)});
    const auto range = optimizer.ranges.find(tensor.unsafeGetTensorImpl());
    if (whole || range == optimizer.ranges.end()) continue;
    OneBitTensor& part = tensors.back();
    part.count = range->second.count;
    part.sizes = {part.count};
    part.strides = {1};
    part.bounds = range->second.bounds;
  }
  return tensors;
}

void check_same(const std::vector<const ParameterEntry*>& entries,
                const std::vector<const OneBitTensor*>& tensors, const char* since, const char* elsewhere) {
  constexpr const char* kWhy = ", and what ranks have agreed on would no longer fit; ";
  for (size_t i = 0; i < std::min(entries.size(), tensors.size()); ++i) {
    const ParameterEntry& entry = *entries[i];
    const OneBitTensor& tensor = *tensors[i];
    const at::Tensor& parameter = entry.parameter;
    const InMessage called{entry.name, parameter.sizes()};
    require(entry.name == tensor.name, "parameter ", called, " took the place of ", InMessage{tensor.name},
            since, kWhy, "leave the list of parameters as it was");
    require(entry.storage == tensor.storage, "parameter ", called, " changed its dtype (it is ",
            parameter.scalar_type(), " now) or its master weights", since, kWhy,
            "change it back, or load a checkpoint");
    const bool fits = entry.range.is_part()
                          ? entry.range.count == tensor.count
                          : parameter.sizes() == at::IntArrayRef(tensor.sizes) &&
                                same_strides(dense_strides(parameter), tensor.strides, tensor.sizes);
    require(fits, "parameter ", called, " changed its shape or memory order (sizes ", parameter.sizes(),
            ", strides ", parameter.strides(), " now)", since, kWhy, "change it back, or load a checkpoint");
  }
  const size_t count = tensors.size();
  const std::string added = entries.size() > count ? entries[count]->name : "";
  const std::string removed = entries.size() < count ? tensors[entries.size()]->name : "";
  require(entries.size() <= count, "parameter ", InMessage{added}, " was added", since, kWhy, elsewhere);
  require(entries.size() >= count, "parameter ", InMessage{removed}, " was removed", since, kWhy,
          "to stop training it, say requires_grad_(false)");
}

OneBitStates onebit_states(const OptimizerView& optimizer, const std::vector<GroupSettings>& settings,
                           const ParamStates& states) {
  OneBitStates found;
  for (const RegisteredParameter& parameter : optimizer.parameters()) {
    if (!settings[parameter.group].compresses(parameter.tensor)) continue;
    const auto state = states.find(parameter.key());
    require(state != states.end(), "the state to load is frozen, but has no variance of parameter ",
            parameter.in_message());
    found.push_back(static_cast<FusedAdamStateFields*>(state->second.get()));
  }
  return found;
}

void give_unstepped_counts(const std::vector<OneBitTensor>& tensors, const OneBitStates& states) {
  std::map<size_t, int64_t> most;  // by group
  int64_t most_of_all = 0;
  std::vector<int64_t> steps;
  for (size_t i = 0; i < tensors.size(); ++i) {
    steps.push_back(states[i]->step());
    most[tensors[i].group] = std::max(most[tensors[i].group], steps[i]);
    most_of_all = std::max(most_of_all, steps[i]);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t of_group = most[tensors[i].group];
    if (steps[i] == 0) states[i]->step(of_group > 0 ? of_group : most_of_all);
  }
}

}  // namespace pacer::detail
