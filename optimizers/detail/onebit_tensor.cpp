#include <pacer/optimizers/detail/onebit_tensor.h>

#include <algorithm>
#include <map>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// f(parameter, its name, group) for all of compressed groups.
template <class F>
void for_each_compressed(const ParamGroups& groups, const std::vector<AdamGroupSettings>& settings,
                         const ParameterNames& names, const F& f) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!settings[g].compress) continue;
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) f(parameters[i], name_of(names, parameters[i], g, i), g);
  }
}

}  // namespace

std::vector<int64_t> counts_of(const std::vector<OneBitTensor>& tensors) {
  std::vector<int64_t> counts;
  for (const OneBitTensor& tensor : tensors) counts.push_back(tensor.count);
  return counts;
}

std::vector<OneBitTensor> onebit_tensors(const ParamGroups& groups,
                                         const std::vector<AdamGroupSettings>& settings,
                                         const ParameterNames& names) {
  std::vector<OneBitTensor> tensors;
  for_each_compressed(
      groups, settings, names, [&](const at::Tensor& parameter, const std::string& name, size_t g) {
        tensors.push_back(
            {name, g, parameter.sizes().vec(), parameter.strides().vec(), parameter.numel(),
             storage_for(parameter.scalar_type(), settings[g].master_weights, Rounding::nearest, name)});
      });
  return tensors;
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

OneBitStates onebit_states(const ParamGroups& groups, const std::vector<AdamGroupSettings>& settings,
                           const ParameterNames& names, const ParamStates& states) {
  OneBitStates found;
  for_each_compressed(
      groups, settings, names, [&](const at::Tensor& parameter, const std::string& name, size_t) {
        const auto state = states.find(parameter.unsafeGetTensorImpl());
        require(state != states.end(), "the state to load is frozen, but has no variance of parameter ",
                InMessage{name, parameter.sizes()});
        found.push_back(static_cast<FusedAdamStateFields*>(state->second.get()));
      });
  return found;
}

}  // namespace pacer::detail
