// What 1-bit LAMB has beside 1-bit Adam's flat buffers: the variance that moves on, and for every tensor its
// scale of momentum, its coefficient and its factor; on the CPU or in device memory, and the kernels over
// them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/onebit_lamb.h>
#include <pacer/optimizers/detail/named_views.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/shared_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Return the mean of a state's trust_average: as it is, and corrected for its start at 0. The corrected one
// is 1 if nothing was averaged. Both wait for a GPU.
double mean_trust(const at::Tensor& trust_average);
double corrected_trust(const at::Tensor& trust_average, const kernels::RuleSettings& settings);

// Takes what OneBitLambKernels::export_state wrote out of the state.
NamedTensors take_lamb_state(NamedTensors& state);
// Whether the name is that of one of the two single numbers that export_state writes for a tensor.
bool is_lamb_number(const std::string& name);
// The rest of it for what these tensors have of the parameters of that name, `whole`.
void cut_lamb_state(const std::vector<OneBitTensor>& tensors, const std::vector<OneBitTensor>& whole,
                    int rank, NamedTensors& state);

// CUDA: the tensors of one dtype set, for the kernels of both 1-bit optimizers.
struct OneBitTable {
  kernels::AdamStorage storage;
  TilesBySize tiles;  // their offsets are places in the buffer
  DeviceBuffer<Tile> units;
  DeviceBuffer<uint32_t> unit_places;  // each one's number among all units
};

class OneBitLambKernels {
 public:
  // `tensors` stay where they are, only their names may change. `units` and `shard_ranks` as in the
  // OneBitBucket.
  OneBitLambKernels(const std::vector<OneBitTensor>& tensors, const kernels::OneBitLayout& layout,
                    const std::vector<Tile>& units, at::Device device,
                    const std::shared_ptr<Communicator>& shard_ranks);

  // Begins at the freeze, from the flat buffers and floors of the tensors; states' trust averages become
  // final. Waits for a GPU.
  void freeze(const OneBitStates& states, const std::vector<GroupSettings>& settings,
              const at::Tensor& variance, const at::Tensor& momentum, const at::Tensor& floors);
  // "NAME/momentum_scale" (fp32), "NAME/lamb_factor" (fp64), one number each, and "NAME/fresh_variance".
  void export_state(NamedTensors& state) const;
  // Takes its own out of such a state. Throws InvalidArgument where that does not fit, changing nothing.
  void import_state(const OneBitStates& states, NamedTensors& state);

  // For the coming steps.
  void configure(const std::vector<GroupSettings>& settings);

  // fp32, one for each tensor.
  const at::Tensor& momentum_scales() const { return momentum_scales_; }
  // See OneBitLamb::factor and momentum_scale. Waits for a GPU.
  struct Numbers {
    double factor = 1, momentum_scale = 1;
  };
  Numbers numbers_of(size_t tensor) const {
    return {factors_[static_cast<int64_t>(tensor)].item<double>(),
            momentum_scales_[static_cast<int64_t>(tensor)].item<double>()};
  }
  // Divides a flat buffer by the scales.
  void unscale(const at::Tensor& flat) const;

  // The momentum before a step: dense where not null and, on CUDA, `status` had no mean.
  struct Before {
    const float* dense = nullptr;
    kernels::OneBitMessages bits;
    const kernels::OneBitStatus* status = nullptr;
  };
  // The parameters take the step, with the dense momentum of `now` where `dense`. CUDA reads `tables`.
  void step(const std::vector<OneBitTable>& tables, const std::vector<Tile>& units,
            const kernels::OneBitAdamWork& now, const Before& before, bool dense,
            const kernels::OneBitControl& control) const;

 private:
  NamedViews saved_views() const;
  kernels::OneBitLambPartials partials() const;
  // Returns the partial results of all units of whole tensors, in memory that `held` holds.
  kernels::OneBitLambPartials all_partials(at::Tensor (&held)[2]) const;

  const std::vector<OneBitTensor>& tensors_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  at::Tensor fresh_variance_;                      // fp32, flat
  at::Tensor momentum_scales_;                     // fp32, by tensor
  at::Tensor step_sizes_;                          // fp32, by tensor
  at::Tensor coefficients_;                        // fp64, by tensor
  at::Tensor factors_;                             // fp64, by tensor
  at::Tensor ratios_;                              // fp32, by unit
  at::Tensor sums_;                                // fp64, (2, units)
  DeviceBuffer<kernels::OneBitLambTensor> table_;  // by tensor
  std::unique_ptr<SharedUnits> shared_units_;      // null where tensors are whole
};

}  // namespace pacer::detail
