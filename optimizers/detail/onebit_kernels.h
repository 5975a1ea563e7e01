// The kernels of the 1-bit optimizers over all tensors of a flat buffer, on the CPU or on a GPU, where they
// are enqueued and do nothing while `control` says so.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/shared_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

class OneBitKernels {
 public:
  // `shard_ranks`: the ranks that have the other parts of the tensors; null where these are whole. Sums are
  // then those of whole tensors, for which all of them call alike.
  OneBitKernels(const std::vector<OneBitTensor>& tensors, const kernels::OneBitLayout& layout,
                at::Device device, const std::shared_ptr<Communicator>& shard_ranks = nullptr);

  // What changes from step to step, and its way to the device.
  void set_tensor(size_t i, const kernels::OneBitAdamTensor& tensor);
  void send();
  const kernels::OneBitAdamTensor* tensors() const { return tensors_.pointer(); }
  // Scalars of so many step groups, from the first on, are read for them.
  int64_t step_groups() const;

  // Returns the number of elements of all tensors, of whole ones if ranks have parts of them.
  int64_t elements() const;

  // *sum (on the device) = that of all stored gradients.
  void sum_of_squares(double* sum);
  // Starts the exchange with the momentum beta1 * m + (1 - beta1) * g.
  void start(OneBitExchange& exchange, const kernels::OneBitAdamWork& work,
             const kernels::GradientCheck* check, int64_t step) const;
  // momentum = beta1 * m + (1 - beta1) * g; with `refresh` the variance takes in the gradients, too.
  void dense_momentum(const kernels::OneBitAdamWork& work, float* momentum, bool refresh,
                      const kernels::OneBitControl& control) const;
  // The parameters take the step, with the dense momentum of `work` where `dense`.
  void update(const kernels::OneBitAdamWork& work, bool dense, const kernels::OneBitControl& control) const;
  // floors[i] from tensor i's part of the variance, and *total, the sum of all of it.
  void floors(const at::Tensor& variance, double share, const at::Tensor& floors, const at::Tensor& total,
              const kernels::OneBitControl& control);
  // Returns the sum of each tensor's variance, as floors() has left it.
  const at::Tensor& sums_of_variance() const { return sums_; }
  // The momentum in fp32, with zeros between tensors.
  at::Tensor decode(const kernels::OneBitAdamWork& work, const kernels::OneBitControl& control) const;

  // The units in which sums are taken, tensor by tensor.
  const std::vector<Tile>& units() const { return units_; }
  // CUDA: the tensors of one dtype set.
  struct Table {
    kernels::AdamStorage storage;
    TilesBySize tiles;  // their offsets are places in the buffer
    DeviceBuffer<Tile> units;
    DeviceBuffer<uint32_t> unit_places;  // each one's number among units()
  };
  const std::vector<Table>& tables() const { return tables_; }

 private:
  void make_tables(const std::vector<OneBitTensor>& tensors);
  void floors_on_cpu(const float* variance, double share, float* floors, double* total) const;
  at::Tensor all_partials() const;
  kernels::OneBitAdamRows rows_of(const kernels::OneBitAdamWork& work) const;
  template <class F>
  void for_units(const F& f) const;

  at::Device device_;
  kernels::OneBitLayout layout_;
  kernels::OneBitRows rows_;
  std::vector<Tile> units_;
  DeviceBuffer<kernels::OneBitAdamTensor> tensors_;
  std::vector<Table> tables_;
  DeviceBuffer<kernels::AdamGradient> gradients_;  // CUDA, for sums: gradients, and the variance
  DeviceBuffer<kernels::AdamGradient> variances_;
  DeviceBuffer<Tile> all_units_;
  DeviceBuffer<TileRange> units_of_;
  DeviceBuffer<int64_t> counts_;
  at::Tensor partials_, sums_;
  std::unique_ptr<SharedUnits> shared_units_;
};

}  // namespace pacer::detail
