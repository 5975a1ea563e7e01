#include <pacer/optimizers/detail/onebit_groups.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

void check_compressible(const OptimizerGroups& groups, const ParameterNames& names) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const std::string name = name_of(names, parameter, g, i);
      require<Unavailable>(parameter.device().is_cpu(), "OneBitAdam works on the CPU so far, but parameter ",
                           name, " is on ", parameter.device().str(), "; use FusedAdamW there");
      if (!is_compressed(groups[g])) continue;
      require(
          parameter.scalar_type() != at::kDouble, "OneBitAdam: parameter ", name,
          " is fp64, but momentum is compressed from fp32; make the model fp32, or put the parameter into a "
          "group with compress(false)");
      require(parameter.is_non_overlapping_and_dense(), "OneBitAdam: parameter ", name,
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

double first_beta2(const OptimizerGroups& groups) {
  for (const auto& group : groups) {
    if (is_compressed(group)) {
      return std::get<1>(static_cast<const OneBitAdamOptions&>(group.options()).betas());
    }
  }
  return std::get<1>(OneBitAdamOptions().betas());
}

std::vector<AdamGroupSettings> settings_of(const OptimizerGroups& groups) {
  std::vector<AdamGroupSettings> settings;
  for (const auto& group : groups) settings.push_back(kOneBitAdamFlavour.settings(group.options()));
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
  double norm = 0;
  for (const AdamEntry& entry : entries) {
    const at::Tensor& variance = entry.state->exp_avg_sq();
    const auto* elements = variance.const_data_ptr<float>();
    const std::vector<Tile> units = make_tiles({variance.numel()}, kReductionUnit);
    std::vector<double> partials(units.size());
    for_each_tile(units, [&](int64_t u) {
      const Tile& unit = units[static_cast<size_t>(u)];
      partials[static_cast<size_t>(u)] = kernels::sum_of_magnitudes_cpu(elements + unit.offset, unit.count);
    });
    const double sum = sum_partials(partials.data(), static_cast<int64_t>(partials.size()));
    const int64_t steps = entry.state->step();
    if (steps > 0) norm += sum / bias_corrections(settings[entry.group].kernel, steps).c2;
  }
  return norm;
}

}  // namespace pacer::detail
