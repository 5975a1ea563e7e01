// What LAMB has beside Adam's tables: reduction units, their sums of squares, and the trust ratio of every
// parameter of one dtype set, on the CPU or in device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/lamb.h>
#include <pacer/optimizers/detail/shared_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

class LambKernels {
 public:
  // For tensors of these element counts, in the order of the table. Ratios are 1 before the first step.
  // averages[i] of the ratios of tensor i, in the memory of its state; null where it has none. `loops` are those of the
  // format that moments have.
  LambKernels(kernels::AdamStorage storage, const kernels::LambLoops& loops,
              const std::vector<int64_t>& counts, std::vector<kernels::LambAverage*> averages,
              at::Device device);
  // The tensors are parts of whole ones, whose other parts these ranks have: elements bounds[i][r] ...
  // bounds[i][r + 1] - 1 of tensor i are rank r's. Bounds are multiples of a unit.
  void share_with(const std::shared_ptr<Communicator>& ranks,
                  const std::vector<std::vector<int64_t>>& bounds);

  // Sends what the kernels need to the GPU, where it changed.
  void send();

  // A step of every tensor whose gradient is not null. Pointers are host or device memory, as the device is.
  struct Step {
    const kernels::AdamTensor* tensors;
    const kernels::AdamGradient* gradients;
    const kernels::StepScalars* scalars;
  };
  // On CUDA `tiles` are those of the update, and `follows_prologue` is as in AdamLaunch.
  void step(const Step& step, const kernels::AdamTiles& tiles, bool follows_prologue);

  // Returns the trust ratio of the tensor at this position; waits for a GPU.
  double ratio(size_t position) const;

 private:
  void step_on_cpu(const Step& step);
  void step_on_cuda(const Step& step, const kernels::AdamTiles& tiles, bool follows_prologue);
  // Returns the sums of all units of the tensors, here and on other ranks.
  kernels::LambPartials gathered();
  kernels::LambPartials partials() const;
  kernels::LambRatio* ratios() const;

  kernels::AdamStorage storage_;
  const kernels::LambLoops& loops_;
  at::Device device_;
  TilesBySize units_;
  DeviceBuffer<TileRange> units_of_;  // by tensor
  at::Tensor sums_;                   // (2, units), double: of parameters, of updates
  at::Tensor ratios_;                 // (tensors, 2), double: LambRatio
  // With other ranks: units_of_ are the whole tensors' units, in all_sums_.
  std::unique_ptr<SharedUnits> shared_units_;
  at::Tensor in_order_;  // of this rank's units in the tensors' order, where they are in units_
  at::Tensor all_sums_;
  DeviceBuffer<kernels::LambAverage*> averages_;
};

}  // namespace pacer::detail
