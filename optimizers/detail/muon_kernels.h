// What Muon has beside Adam's tables: the directions of all matrices of one dtype set and one group of
// settings, in batches of one shape, and the products that orthogonalise them.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/muon.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class MuonKernels {
 public:
  MuonKernels(kernels::AdamStorage storage, const MuonSettings& settings, at::Device device)
      : storage_(storage), settings_(settings), device_(device) {}

  // Adds a prepared entry, a matrix as check_matrices wants it, in the order of the table.
  void add(const ParameterEntry& entry);
  // After the last: makes the memory of directions, which stays between steps.
  void build();

  // Takes which matrices have gradients, those of the table, and sends what changed to the GPU.
  void send(const std::vector<kernels::AdamGradient>& gradients);

  // Momentum and products of every matrix whose gradient is not null. Returns what the update by kMuonUpdate
  // reads as gradients. Pointers are host or device memory, as the device is; the tiles are those of the table,
  // on a CPU or on a GPU.
  const kernels::AdamGradient* step(const kernels::AdamTensor* tensors,
                                    const kernels::AdamGradient* gradients,
                                    const kernels::StepScalars* scalars, const std::vector<Tile>& units,
                                    const kernels::AdamTiles& tiles);

 private:
  // Matrices of one shape and memory order: `members` lie one behind the other in the directions.
  struct Batch {
    at::Tensor like;  // the memory of one
    std::vector<size_t> members;
    at::Tensor directions, results;  // (members, shape of a parameter); results may be the directions
  };

  at::ScalarType type_of_products() const;
  void orthogonalize(const Batch& batch) const;

  kernels::AdamStorage storage_;
  MuonSettings settings_;
  at::Device device_;
  std::vector<Batch> batches_;
  size_t matrices_ = 0;
  DeviceBuffer<void*> directions_;               // by matrix
  std::vector<const void*> results_;             // by matrix
  DeviceBuffer<kernels::AdamGradient> updates_;  // the results of those that take part
};

}  // namespace pacer::detail
