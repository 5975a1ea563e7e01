// The launches that update the paged tensors of one dtype set: one for all that stay on the device, and one
// for each page. A launch is what a DtypeTable is for tensors that lie still: pointers, gradients and tiles,
// of pieces of tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <pacer/optimizers/detail/dtype_table.h>

namespace pacer::detail {

// Elements first ... first + count - 1 of the table's tensor at `position`. Pointers are such that the
// elements are at those indices, although what lies before `first` is something else's memory, or nobody's.
struct PagedPiece {
  size_t position;
  int64_t first;
  int64_t count;
  kernels::AdamTensor tensor;
};

class PagedTable {
 public:
  // `has_codes`: moments are in 8 bits; their scales lie on the device and are not paged.
  PagedTable(kernels::AdamLaunch launch, kernels::UpdateRule rule, bool has_codes, at::Device device)
      : launch_(launch), rule_(rule), has_codes_(has_codes), device_(device) {}

  // Returns the number of the launch. All are added before the first step. LAMB's pieces are whole tensors.
  size_t add_launch(const std::vector<PagedPiece>& pieces);

  // Takes over the gradients of the table whose tensors these are pieces of.
  void set_gradients(const std::vector<kernels::AdamGradient>& of_table);
  // The same for the one tensor that has this launch for itself.
  void set_gradient(size_t launch, const kernels::AdamGradient& gradient) {
    gradients_.set(launches_[launch].first_piece, gradient);
  }
  // Sends what the launches need to the GPU, where it changed.
  void send();

  // Whether any piece has a gradient.
  bool takes_part(size_t launch) const;
  // See DtypeTable::step.
  void step(size_t launch, const kernels::StepScalars* scalars, bool follows_prologue);

  // See DtypeTable::trust_ratio; it is 1 for a tensor without elements.
  double trust_ratio(size_t position) const;

 private:
  struct Launch {
    size_t first_piece;
    size_t pieces;
    size_t first_tile;
    int64_t large_tiles;  // as in TilesBySize
    int64_t tiles;
    std::optional<LambKernels> lamb;
  };
  void add_tiles(const std::vector<PagedPiece>& pieces, Launch& launch);

  kernels::AdamLaunch launch_;
  kernels::UpdateRule rule_;
  bool has_codes_;
  at::Device device_;
  std::vector<Launch> launches_;
  std::vector<size_t> positions_;  // by piece
  DeviceBuffer<kernels::AdamTensor> tensors_;
  DeviceBuffer<kernels::AdamGradient> gradients_;
  DeviceBuffer<Tile> tiles_;
};

}  // namespace pacer::detail
