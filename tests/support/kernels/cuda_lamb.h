// A list of tensors of one Adam dtype set on the GPU, with everything a LAMB step needs.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/lamb.h>

#include "support/kernels/cuda_adam.h"
#include "support/kernels/lamb_kernels.h"

namespace pacer::kernels::testing {

// The units of tensors of these sizes, those for blocks first, and where each tensor's are.
struct CutUnits {
  std::vector<Tile> units;
  int64_t block_units = 0, warp_units = 0;
  std::vector<TileRange> units_of;
};

inline CutUnits cut_units(const std::vector<int64_t>& counts, Cut cut) {
  CutUnits result;
  for (const bool by_warp : {false, true}) {
    for (const Tile& unit : make_tiles(counts, kReductionUnit)) {
      if ((cut != Cut::blocks && counts[unit.tensor] <= kLambWarpUnit) != by_warp) continue;
      result.units.push_back(unit);
    }
    if (!by_warp) result.block_units = static_cast<int64_t>(result.units.size());
  }
  result.units_of = tile_ranges(result.units, counts.size());
  result.warp_units = static_cast<int64_t>(result.units.size()) - result.block_units;
  return result;
}

class DeviceLambList {
 public:
  DeviceLambList(std::vector<AdamArrays>& host, Cut cut)
      : storage_(host.at(0).storage()),
        list_(host, cut, /*amsgrad=*/false),
        cut_(cut_units(counts_of(host), cut)),
        units_(cut_.units),
        units_of_(cut_.units_of),
        sums_(std::vector<double>(2 * cut_.units.size(), -1)),
        ratios_(std::vector<LambRatio>(host.size(), LambRatio{-1, -1})) {}

  DeviceAdamList& list() { return list_; }
  std::vector<LambRatio> ratios() const { return ratios_.get(); }
  int64_t differing_from(std::vector<AdamArrays>& host) { return list_.differing_from(host); }

  void enqueue(const StepScalars* device_scalars, Stream stream, bool follows_prologue = false) const {
    const auto units = static_cast<int64_t>(cut_.units.size());
    const LambWork work{{units_.data(), cut_.block_units, cut_.warp_units},
                        list_.device_tiles(),
                        units_of_.data(),
                        static_cast<int64_t>(cut_.units_of.size()),
                        {sums_.data(), sums_.data() + units},
                        ratios_.data(),
                        /*averages=*/nullptr};
    lamb_cuda(storage_, work, list_.device_tensors(), list_.device_gradients(), device_scalars,
              follows_prologue, stream);
  }
  void step(const LambGroupScalars& scalars) const {
    const DeviceArray<StepScalars> device_scalars(scalars.all());
    enqueue(device_scalars.data(), nullptr);
    synchronize();
  }

 private:
  static std::vector<int64_t> counts_of(const std::vector<AdamArrays>& host) {
    std::vector<int64_t> counts;
    for (const AdamArrays& arrays : host) counts.push_back(arrays.count());
    return counts;
  }

  AdamStorage storage_;
  DeviceAdamList list_;
  CutUnits cut_;
  DeviceArray<Tile> units_;
  DeviceArray<TileRange> units_of_;
  DeviceArray<double> sums_;
  DeviceArray<LambRatio> ratios_;
};

// Equal bits, or both NaN.
inline bool same_ratio(const LambRatio& a, const LambRatio& b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a.ratio) && std::isnan(b.ratio));
}

}  // namespace pacer::kernels::testing
