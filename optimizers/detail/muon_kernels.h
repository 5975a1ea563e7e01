// What Muon has beside Adam's tables: the directions of all matrices of one dtype set and one group of
// settings, in batches of one shape, the products that orthogonalise them, and the moments of their rows.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/muon.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class DirectionExchange;

class MuonKernels {
 public:
  // `exchange`: ranks make directions together; null: what each has of its own is what all have.
  MuonKernels(kernels::AdamStorage storage, const MuonSettings& settings, const DirectionExchange* exchange,
              at::Device device)
      : storage_(storage), settings_(settings), exchange_(exchange), device_(device) {}

  // Adds a prepared entry, a matrix as check_matrices wants it, in the order of the table.
  void add(const ParameterEntry& entry);
  // After the last: makes the memory of directions, which stays between steps.
  void build();

  // Takes which matrices have gradients, those of the table, and sends what changed to the GPU.
  void send(const std::vector<kernels::AdamGradient>& gradients);

  // What kernels read of a step: host or device memory, as the device is.
  struct Step {
    const kernels::AdamTensor* tensors;
    const kernels::AdamGradient* gradients;
    const kernels::StepScalars* scalars;
  };
  // The directions of all matrices whose gradient is not null, and the products: all that may run out of
  // memory. State stays as it is. The tiles are those of the table, on a CPU or on a GPU.
  // With an exchange it ends with this rank's own directions, made orthogonal, as what it brings.
  void orthogonalize(const Step& step, const std::vector<Tile>& units, const kernels::AdamTiles& tiles);
  // Behind the exchange: its mean is orthogonalised once more.
  void take_mean(const Step& step);
  // Behind it: changes their state. Returns what the update by kMuonUpdate reads as gradients.
  const kernels::AdamGradient* step(const Step& step, const std::vector<Tile>& units,
                                    const kernels::AdamTiles& tiles);

 private:
  // Matrices of one shape and memory order: `members` lie one behind the other in the directions.
  struct Batch {
    at::Tensor like;  // the memory of one
    std::vector<size_t> members;
    at::Tensor directions, results;  // (members, shape of a parameter); results may be the directions
    at::Tensor fresh;                // (members, rows): their new moments, where rows are normalised
    int64_t first_rows = 0;          // where its members begin in rows_
  };

  at::ScalarType type_of_products() const;
  // The dtype of what has a number for each row.
  at::ScalarType type_of_rows() const;
  // Writes directions where there are some, else momentum.
  void run_momentum(void* const* directions, const Step& step, const std::vector<Tile>& units,
                    const kernels::AdamTiles& tiles) const;
  void bring_own_directions();
  // Calls f(first, matrices) for all of a batch, some at a time: the directions of its members from `first` on,
  // (n, rows, columns) as the split has them, made orthogonal and multiplied with `scale`.
  template <class F>
  void for_orthogonalized(const Batch& batch, double scale, const F& f) const;
  // From directions to results.
  void orthogonalize(const Batch& batch, const Step& step) const;
  // The matrices (n, rows, columns), n / split members of the batch from `first` on, with their rows alike,
  // times `scale`.
  at::Tensor with_like_rows(const Batch& batch, int64_t first, const at::Tensor& matrices, double scale,
                            const Step& step) const;
  void run_rows(int64_t first, int64_t count, bool stores, const Step& step) const;

  kernels::AdamStorage storage_;
  MuonSettings settings_;
  const DirectionExchange* exchange_;
  at::Device device_;
  std::vector<Batch> batches_;
  size_t matrices_ = 0;
  std::vector<size_t> exchanged_;  // by matrix: its number in the exchange
  // Views of the directions here and in the exchange, by batch, then by member; empty where there is none.
  std::vector<at::Tensor> own_, shared_;
  std::vector<at::Tensor> row_moments_;          // by matrix, undefined where rows stay as they are
  DeviceBuffer<kernels::MuonRows> rows_;         // by batch, then by member; empty likewise
  DeviceBuffer<void*> directions_;               // by matrix
  std::vector<const void*> results_;             // by matrix
  DeviceBuffer<kernels::AdamGradient> updates_;  // the results of those that take part
};

}  // namespace pacer::detail
