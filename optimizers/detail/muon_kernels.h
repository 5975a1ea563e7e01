// What Muon has beside Adam's tables: the directions of all matrices of one dtype set and one group of
// settings, in batches of one shape, the products that orthogonalise them, and the moments of their rows.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/muon.h>
#include <pacer/optimizers/detail/matrix_parts.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class DirectionExchange;
class ProductShare;

class MuonKernels {
 public:
  // `loops` are those of the format that the momentum has. `exchange`: ranks make directions together; null: what each
  // has of its own is what all have. `share`: then each rank orthogonalises its part of them; null: all of them. One of
  // the two is null.
  MuonKernels(kernels::AdamStorage storage, const kernels::MuonLoops& loops, const MuonSettings& settings,
              const DirectionExchange* exchange, ProductShare* share, at::Device device)
      : storage_(storage),
        loops_(loops),
        settings_(settings),
        exchange_(exchange),
        share_(share),
        device_(device) {}

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
    at::Tensor like;  // the memory of one, or where ranks have parts of them, what that would look like
    std::vector<size_t> members;
    // (members, shape of a parameter); results may be the directions. Where ranks have parts, directions are whole
    // ones of this rank's members only, and results are elsewhere.
    at::Tensor directions, results;
    at::Tensor fresh;             // (members, rows): their new moments, where rows are normalised
    int64_t first_rows = 0;       // where its members begin in rows_
    std::vector<int64_t> bounds;  // of the members that each rank orthogonalises
    int64_t begin = 0, end = 0;   // of this rank's, which are all where nothing is shared
    int64_t first_direction = 0;  // which member the directions begin with
    MatrixParts parts;
  };

  at::ScalarType type_of_products() const;
  // The dtype of what has a number for each row.
  at::ScalarType type_of_rows() const;
  // Writes directions where there are some, else momentum.
  void run_momentum(void* const* directions, const Step& step, const std::vector<Tile>& units,
                    const kernels::AdamTiles& tiles) const;
  void bring_own_directions();
  // What is orthogonalised by itself, a matrix or one of the pieces that it is split into.
  struct Piece {
    int64_t rows, columns;
  };
  Piece piece_of(const Batch& batch) const;
  double cost_of(const Batch& batch) const;
  void deal_out();
  void make_memory(Batch& batch);
  // Gives each matrix, of which this rank has a part, the memory of its direction and its way to its owner.
  void make_parts();
  // This rank's part of a batch, some matrices at a time: their directions, in pieces as the split has them, made
  // orthogonal and multiplied with `scale`, become what is at the same place of `into`. `like_rows`: with rows
  // normalised, for that step; null: as they are.
  void orthogonalize(const Batch& batch, const at::Tensor& into, double scale, const Step* like_rows) const;
  // From directions to results, or where ranks share them, to this rank's part of directions.
  void make_results(const Batch& batch, const Step& step) const;
  // All of them, of all ranks: where each has whole gradients, and where each has parts.
  void make_shared_results(const Step& step);
  void make_results_of_parts(const Step& step);
  // The matrices (n, rows, columns), n / split members of the batch from `first` on, with their rows alike,
  // times `scale`.
  at::Tensor with_like_rows(const Batch& batch, int64_t first, const at::Tensor& matrices, double scale,
                            const Step& step) const;
  void run_rows(int64_t first, int64_t count, bool stores, const Step& step) const;

  kernels::AdamStorage storage_;
  const kernels::MuonLoops& loops_;
  MuonSettings settings_;
  const DirectionExchange* exchange_;
  ProductShare* share_;
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
  // Where ranks share the products: of which matrices this rank makes a direction, or a part of it, and the gradients
  // of those; the others' are null.
  std::vector<char> makes_direction_;
  DeviceBuffer<kernels::AdamGradient> own_gradients_;
  // Where ranks have parts of matrices: what this rank has of each. The parts of directions become those of
  // results, which may be the same memory.
  struct Part {
    int64_t count;
    std::vector<int64_t> bounds;
  };
  std::vector<Part> parts_;  // by matrix; empty where matrices are whole
  at::Tensor direction_parts_, result_parts_;
};

}  // namespace pacer::detail
