// A list of tensors of one Adam dtype set on the GPU, with
// everything a launch needs: the counterpart of AdamArrays.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>

#include "support/cuda_memory.h"
#include "support/kernels/adam_arrays.h"

namespace pacer::kernels::testing {

using pacer::testing::DeviceArray;
using pacer::testing::DeviceMemory;
using pacer::testing::synchronize;

// How the tensors of a list are cut: small ones for warps and the others for blocks, or all of one kind.
enum class Cut { mixed, blocks, warps };

struct CutTiles {
  std::vector<Tile> tiles;  // block tiles first
  int64_t block_tiles;
  int64_t warp_tiles;
};

inline CutTiles cut_for_gpu(AdamStorage storage, const std::vector<int64_t>& counts, Cut cut) {
  const int64_t block = adam_cuda_block_tile(storage), warp = adam_cuda_warp_tile(storage);
  std::vector<int64_t> for_blocks = counts, for_warps = counts;
  for (size_t t = 0; t < counts.size(); ++t) {
    const bool by_warp = cut == Cut::warps || (cut == Cut::mixed && counts[t] <= warp);
    (by_warp ? for_blocks : for_warps)[t] = 0;
  }
  CutTiles result{make_tiles(for_blocks, block), 0, 0};
  const std::vector<Tile> warp_tiles = make_tiles(for_warps, warp);
  result.block_tiles = static_cast<int64_t>(result.tiles.size());
  result.warp_tiles = static_cast<int64_t>(warp_tiles.size());
  result.tiles.insert(result.tiles.end(), warp_tiles.begin(), warp_tiles.end());
  return result;
}

// All arrays of all tensors lie in one allocation, each behind guard
// bytes and with the alignment that it has on the host (modulo 64 bytes).
class DeviceAdamList {
 public:
  DeviceAdamList(std::vector<AdamArrays>& host, Cut cut, bool amsgrad)
      : launch_{host.at(0).storage(), amsgrad},
        image_(lay_out(host), kGuardByte),
        memory_(image_.size()),
        cut_(cut_for_gpu(launch_.storage, counts_of(host), cut)),
        tiles_(cut_.tiles),
        tensors_(std::vector<AdamTensor>(host.size())),
        gradients_(std::vector<AdamGradient>(host.size())) {
    upload(host);
    std::vector<AdamTensor> tensors;
    std::vector<AdamGradient> gradients;
    int64_t first_element = 0;
    for (size_t t = 0; t < host.size(); ++t) {
      const auto at = [&](int array) { return static_cast<void*>(memory_.data() + places_[t][array]); };
      tensors.push_back({at(kParameter), at(kExpAvg), at(kExpAvgSq), amsgrad ? at(kMaxExpAvgSq) : nullptr,
                         host[t].element(kExtra) > 0 ? at(kExtra) : nullptr, first_element});
      gradients.push_back({at(kGradient), 0});
      first_element += host[t].count();
    }
    tensors_.set(tensors);
    set_gradients(gradients);
  }

  // The gradients as a launch sees them; pointers are this list's own, or null.
  const std::vector<AdamGradient>& gradients() const { return host_gradients_; }
  void set_gradients(const std::vector<AdamGradient>& gradients) {
    host_gradients_ = gradients;
    gradients_.set(gradients);
  }

  // What a launch takes, in device memory.
  AdamTiles device_tiles() const { return {tiles_.data(), cut_.block_tiles, cut_.warp_tiles}; }
  const AdamTensor* device_tensors() const { return tensors_.data(); }
  const AdamGradient* device_gradients() const { return gradients_.data(); }

  void enqueue(const StepScalars* device_scalars, Stream stream) const {
    adam_cuda(launch_, device_tiles(), device_tensors(), device_gradients(), device_scalars, stream);
  }

  void step(const AdamGroupScalars& scalars) const {
    const DeviceArray<StepScalars> device_scalars(scalars.all());
    enqueue(device_scalars.data(), nullptr);
    synchronize();
  }

  // Elements that differ from those of `host` (NaNs are equal), or -1 where a guard byte was overwritten.
  int64_t differing_from(const std::vector<AdamArrays>& host) {
    memory_.download(image_.data(), image_.size());
    int64_t differing = 0;
    for (size_t t = 0; t < host.size(); ++t) {
      AdamArrays mine(host[t].storage(), host[t].count());
      for (int array = 0; array < kAdamArrays; ++array) {
        const auto begin = image_.begin() + static_cast<int64_t>(places_[t][array]);
        const auto end = begin + static_cast<int64_t>(host[t].size(array));
        const auto is_guard = [](unsigned char byte) { return byte == kGuardByte; };
        if (!std::all_of(begin - kGuardBytes, begin, is_guard) ||
            !std::all_of(end, end + kGuardBytes, is_guard)) {
          return -1;
        }
        std::copy(begin, end, mine.data(array));
      }
      differing += differing_elements(mine, host[t]);
    }
    return differing;
  }

 private:
  static constexpr int64_t kGuardBytes = 64;
  static constexpr unsigned char kGuardByte = 0xA5;

  static std::vector<int64_t> counts_of(const std::vector<AdamArrays>& host) {
    std::vector<int64_t> counts;
    for (const AdamArrays& arrays : host) counts.push_back(arrays.count());
    return counts;
  }

  // Sets places_ and returns the bytes that all takes.
  size_t lay_out(const std::vector<AdamArrays>& host) {
    size_t used = 0;
    for (const AdamArrays& arrays : host) {
      places_.emplace_back();
      for (int array = 0; array < kAdamArrays; ++array) {
        const size_t shift = reinterpret_cast<uintptr_t>(arrays.data(array)) % 64;
        places_.back()[array] = used + kGuardBytes + shift;
        used = (places_.back()[array] + arrays.size(array) + kGuardBytes + 63) / 64 * 64;
      }
    }
    return used;
  }

  void upload(const std::vector<AdamArrays>& host) {
    for (size_t t = 0; t < host.size(); ++t) {
      for (int array = 0; array < kAdamArrays; ++array) {
        std::copy_n(host[t].data(array), host[t].size(array), image_.data() + places_[t][array]);
      }
    }
    memory_.upload(image_.data(), image_.size());
  }

  AdamLaunch launch_;
  std::vector<std::array<size_t, kAdamArrays>> places_;
  std::vector<unsigned char> image_;
  DeviceMemory memory_;
  CutTiles cut_;
  DeviceArray<Tile> tiles_;
  DeviceArray<AdamTensor> tensors_;
  DeviceArray<AdamGradient> gradients_;
  std::vector<AdamGradient> host_gradients_;
};

}  // namespace pacer::kernels::testing
