#include <pacer/optimizers/detail/onebit_groups.h>

#include <map>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/tensor_sums.h>

namespace pacer::detail {

void check_compressible(const char* optimizer, const OptimizerGroups& groups, const ParameterNames& names) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const std::string name = name_of(names, parameter, g, i);
      require(parameter.device() == device_of(groups), optimizer, ": parameter ", name, " is on ",
              parameter.device().str(), ", but the first one is on ", device_of(groups).str(),
              "; move the model to one device first");
      if (!is_compressed(groups[g])) continue;
      require(
          parameter.scalar_type() != at::kDouble, optimizer, ": parameter ", name,
          " is fp64, but momentum is compressed from fp32; make the model fp32, or put the parameter into a "
          "group with compress(false)");
      require(parameter.is_non_overlapping_and_dense(), optimizer, ": parameter ", name,
              " has gaps between its elements; pass a contiguous one, or put it into a group with "
              "compress(false)");
    }
  }
}

at::Device device_of(const OptimizerGroups& groups) {
  for (const auto& group : groups) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return at::kCPU;
}

double first_beta2(const AdamFlavour& flavour, const OptimizerGroups& groups) {
  for (const auto& group : groups) {
    if (is_compressed(group)) return flavour.settings(group.options()).kernel.beta2;
  }
  return kernels::AdamSettings().beta2;
}

std::vector<AdamGroupSettings> settings_of(const AdamFlavour& flavour, const OptimizerGroups& groups) {
  std::vector<AdamGroupSettings> settings;
  for (const auto& group : groups) settings.push_back(flavour.settings(group.options()));
  return settings;
}

OptimizerGroups full_precision_groups(const OptimizerGroups& groups) {
  OptimizerGroups full;
  for (const auto& group : groups) {
    if (!is_compressed(group)) full.push_back(group);
  }
  return full;
}

double variance_norm(const std::vector<AdamEntry>& entries, const std::vector<AdamGroupSettings>& settings) {
  if (entries.empty()) return 0;
  std::vector<const float*> variances;
  std::vector<int64_t> counts;
  for (const AdamEntry& entry : entries) {
    variances.push_back(entry.state->exp_avg_sq().const_data_ptr<float>());
    counts.push_back(entry.parameter.numel());
  }
  const std::vector<double> sums =
      tensor_sums(Term::magnitude, variances, counts, entries.front().parameter.device());
  std::map<const StepClock*, int64_t> steps_of;  // each is read once: that waits for a GPU
  double norm = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const FusedAdamStateFields& state = *entries[i].state;
    const auto [steps, is_new] = steps_of.emplace(state.clock().get(), 0);
    if (is_new || state.clock() == nullptr) steps->second = state.step();
    if (steps->second > 0) {
      norm += sums[i] / bias_corrections(settings[entries[i].group].kernel, steps->second).c2;
    }
  }
  return norm;
}

}  // namespace pacer::detail
