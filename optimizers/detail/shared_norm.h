// The squares of gradients of which ranks have parts, added up to the bits that one rank gets that has all of
// them. They are added in units of whole tensors (core/reduction_order.h), so what the bounds of parts cut
// off a unit goes to the rank that has its beginning; then all ranks get the sums of all units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/shared_sums.h>

namespace pacer::detail {

class SharedNorm {
 public:
  SharedNorm(const std::shared_ptr<Communicator>& ranks, at::Device device)
      : ranks_(ranks), device_(device), shared_sums_(ranks, device) {}

  // A gradient: this rank has `own`, a vector of elements bounds[rank] ... bounds[rank + 1] - 1 of the whole
  // one. All are added before the first sum, in the same order on all ranks.
  void add(kernels::GradientType type, const at::Tensor& own, const std::vector<int64_t>& bounds);

  // The sums of all units in order, double, on the device: those of every gradient from its start on. All
  // ranks together.
  at::Tensor sums();

 private:
  // Elements of an own gradient, whose memory may be another one in each step.
  struct Piece {
    at::Tensor own;
    int64_t begin, count;
    at::Tensor elements() const { return own.narrow(0, begin, count); }
  };
  // A unit that begins here and ends elsewhere.
  struct CutReductionUnit {
    size_t table, gradient;  // where its memory counts as a gradient
    int64_t count;
    Piece beginning;
    std::vector<std::pair<int, int64_t>> rest;  // ranks, and how many elements come from them
  };
  // Gradients of one dtype, and the units that begin here.
  struct Table {
    kernels::GradientType type;
    std::vector<at::Tensor> own;  // one for each of `gradients`; undefined where that is a cut unit
    DeviceBuffer<kernels::AdamGradient> gradients;
    DeviceBuffer<Tile> units;
    DeviceBuffer<uint32_t> places;  // among this rank's sums
  };

  size_t table_of(kernels::GradientType type);
  void add_unit(size_t table, const at::Tensor& own, const std::vector<int64_t>& bounds, int64_t begin);
  void prepare();
  void make_memory();
  void exchange_pieces();
  void add_squares(Table& table, double* sums);

  const std::shared_ptr<Communicator> ranks_;
  const at::Device device_;
  std::vector<Table> tables_;
  std::vector<std::pair<Piece, int>> sent_;  // of a unit that begins on another rank, which gets it
  std::vector<CutReductionUnit> cut_units_;
  std::vector<at::Tensor> whole_units_;  // of cut_units_, once they are needed
  SharedSums shared_sums_;
  at::Tensor own_sums_;
};

}  // namespace pacer::detail
