#include <pacer/optimizers/detail/onebit_groups.h>

#include <algorithm>
#include <map>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/collectives/detail/device_buffer.h>
#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/tile_loop.h>

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

namespace {

// Sums of magnitudes of the variances, unit by unit; on the host.
std::vector<double> unit_sums(const std::vector<AdamEntry>& entries, const std::vector<Tile>& units) {
  std::vector<double> sums(units.size());
  if (entries.empty() || entries.front().parameter.is_cpu()) {
    for_each_tile(units, [&](int64_t u) {
      const Tile& unit = units[static_cast<size_t>(u)];
      const auto* elements = entries[unit.tensor].state->exp_avg_sq().const_data_ptr<float>();
      sums[static_cast<size_t>(u)] = kernels::sum_of_magnitudes_cpu(elements + unit.offset, unit.count);
    });
    return sums;
  }
  const at::Device device = entries.front().parameter.device();
  const c10::DeviceGuard guard(device);
  DeviceBuffer<Tile> tiles;
  DeviceBuffer<kernels::AdamGradient> arrays;
  tiles.host() = units;
  for (const AdamEntry& entry : entries) {
    arrays.host().push_back({entry.state->exp_avg_sq().const_data_ptr(), 0});
  }
  tiles.send(device);
  arrays.send(device);
  const at::Tensor partials =
      at::empty({static_cast<int64_t>(units.size())}, at::TensorOptions().dtype(at::kDouble).device(device));
  kernels::sum_of_magnitudes_cuda(tiles.pointer(), static_cast<int64_t>(units.size()), arrays.pointer(),
                                  partials.mutable_data_ptr<double>(), current_stream(device));
  const at::Tensor on_host = partials.cpu();
  std::copy_n(on_host.const_data_ptr<double>(), units.size(), sums.begin());
  return sums;
}

}  // namespace

double variance_norm(const std::vector<AdamEntry>& entries, const std::vector<AdamGroupSettings>& settings) {
  std::vector<int64_t> counts;
  for (const AdamEntry& entry : entries) counts.push_back(entry.parameter.numel());
  const std::vector<Tile> units = make_tiles(counts, kReductionUnit);
  const std::vector<double> sums = unit_sums(entries, units);
  std::map<const StepClock*, int64_t> steps_of;  // each is read once: that waits for a GPU
  double norm = 0;
  size_t u = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const size_t begin = u;
    while (u < units.size() && units[u].tensor == i) ++u;
    const double sum = sum_partials(sums.data() + begin, static_cast<int64_t>(u - begin));
    const FusedAdamStateFields& state = *entries[i].state;
    const auto [steps, is_new] = steps_of.emplace(state.clock().get(), 0);
    if (is_new || state.clock() == nullptr) steps->second = state.step();
    if (steps->second > 0)
      norm += sum / bias_corrections(settings[entries[i].group].kernel, steps->second).c2;
  }
  return norm;
}

}  // namespace pacer::detail
