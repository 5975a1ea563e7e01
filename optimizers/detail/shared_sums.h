// Sums over units of tensors (core/reduction_order.h) of which ranks have parts: each rank adds up the units
// that begin there, and then all ranks have the sums of all units, in the order in which one rank has them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/tile.h>

namespace pacer::detail {

// Bounds of parts as ParameterRange has them: which rank has that element.
int owner_of(const std::vector<int64_t>& bounds, int64_t element);

class SharedSums {
 public:
  SharedSums(std::shared_ptr<Communicator> ranks, at::Device device);

  // The next unit begins on that rank. All are added before the first gather, alike on all ranks. Returns its
  // number among the units of that rank.
  int64_t add_unit(int rank);
  // Units that begin on this rank, and all.
  int64_t own() const;
  int64_t all() const { return units_; }

  // `sums`: double, (rows, own()) on the device, of this rank's units in order. Returns (rows, all()), in
  // memory that is used again by the next one.
  at::Tensor gather(const at::Tensor& sums);

 private:
  void prepare(int64_t rows);

  const std::shared_ptr<Communicator> ranks_;
  const at::Device device_;
  std::vector<std::vector<int64_t>> units_of_;  // by rank: which of all units, in order
  int64_t units_ = 0;
  int64_t width_ = 0;      // the longest list of a rank
  at::Tensor sent_, all_;  // (rows, width_), and (ranks, rows, width_)
  at::Tensor order_;       // of each sum of the result, where it is in all_
};

// Tensors of which each rank has a part, whose bounds are multiples of a unit: all units of a tensor, as if
// one rank had all of it.
class SharedUnits {
 public:
  // Bounds of each tensor, as ParameterRange has them.
  SharedUnits(std::shared_ptr<Communicator> ranks, const std::vector<std::vector<int64_t>>& bounds,
              at::Device device);

  // Which of all units belong to each whole tensor, and how many elements it has.
  const std::vector<TileRange>& units_of() const { return units_of_; }
  const std::vector<int64_t>& counts() const { return counts_; }
  int64_t elements() const;
  // See SharedSums::gather; `sums` are those of the units of this rank's parts, tensor by tensor.
  at::Tensor gather(const at::Tensor& sums) { return sums_.gather(sums); }

 private:
  SharedSums sums_;
  std::vector<TileRange> units_of_;
  std::vector<int64_t> counts_;
};

}  // namespace pacer::detail
