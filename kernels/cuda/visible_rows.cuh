// Which packets of elements have visible rows (RowMask): what a block finds before it works on them.
#pragma once

#include <cstdint>

#include <pacer/kernels/adam.h>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {

// So many tiles a block takes at once.
constexpr int kTilesOfRows = 8;

inline unsigned blocks_for_rows(const AdamTiles& table) {
  return static_cast<unsigned>(ceil_divide(table.block_tiles + table.warp_tiles, kTilesOfRows));
}

// The packets of kElements that have a visible row, in the shared memory of a block of kThreads. A tile has at most
// kThreads packets. What is not visible costs a look at its row and no more: to ask of each packet whether it has
// visible rows would take .29 of a step of all rows on an H200.
template <int kThreads, int kElements>
struct VisiblePackets {
  struct Packet {
    const Tile& tile;
    int begin;       // in the tile
    int count;       // of elements, kElements but at the tile's end
    uint32_t which;  // bit k is set where element k is of a visible row
  };

  int count;

  // The number of the i-th packet, i below last(). Where most packets are visible they come in memory order, so that
  // neighbouring threads have neighbours, and some without visible rows come with them.
  __device__ int last() const { return are_most() ? kPackets : count; }
  __device__ int number(int i) const { return are_most() ? i : found_[i]; }

  // All threads of the block call it.
  __device__ void find(const AdamTiles& table, const RowMask* masks, const AdamGradient* gradients) {
    if (threadIdx.x == 0) count = 0;
    for (int i = threadIdx.x; i < kPackets; i += kThreads) which_[i] = 0;
    if (threadIdx.x < kTilesOfRows) tiles_[threadIdx.x] = tile_of(threadIdx.x, table, masks, gradients);
    __syncthreads();
    for (int t = threadIdx.x / kWarp; t < kTilesOfRows; t += kThreads / kWarp) find_in(t);
    __syncthreads();
  }

  __device__ Packet at(int number) const {
    const Tile& tile = tiles_[number / kThreads].tile;
    const int begin = number % kThreads * kElements;
    return {tile, begin, min(kElements, static_cast<int>(tile.count) - begin), which_[number]};
  }

 private:
  static constexpr int kPackets = kTilesOfRows * kThreads;
  __device__ bool are_most() const { return count > kPackets / 2; }

  // A tile, and where its rows are: the first ends at first_end, the others have `width` elements each, or more where the tile
  // ends before.
  struct TileRows {
    Tile tile;
    const bool* visible;  // of the first row; null: all are
    int rows;
    int first_end;
    int width;
  };

  __device__ static TileRows tile_of(int t, const AdamTiles& table, const RowMask* masks,
                                     const AdamGradient* gradients) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kTilesOfRows + t;
    TileRows of{};
    if (index >= table.block_tiles + table.warp_tiles) return of;
    const Tile tile = table.tiles[index];
    if (gradients[tile.tensor].gradient == nullptr) return of;
    const RowMask mask = masks[tile.tensor];
    const int64_t end = tile.offset + tile.count;
    const int64_t width = mask.visible == nullptr ? end : mask.width;
    const int64_t row = tile.offset / width, last = (end - 1) / width;
    of.tile = tile;
    of.visible = mask.visible == nullptr ? nullptr : mask.visible + row;
    of.rows = static_cast<int>(last - row) + 1;
    const int64_t count = tile.count, first_end = (row + 1) * width - tile.offset;
    of.first_end = static_cast<int>(first_end < count ? first_end : count);
    of.width = static_cast<int>(width < count ? width : count);
    return of;
  }

  __device__ static bool shows(const TileRows& of, int row) {
    return of.visible == nullptr || of.visible[row];
  }

  // The threads of a warp call it together.
  __device__ void find_in(int t) {
    const TileRows of = tiles_[t];
    const int lane = threadIdx.x % kWarp;
    bool are_all = of.rows > 0;
    for (int first = 0; are_all && first < of.rows; first += kWarp) {
      are_all = __all_sync(0xFFFFFFFFu, first + lane >= of.rows || shows(of, first + lane)) != 0;
    }
    if (are_all) return note_all(t, static_cast<int>(of.tile.count), lane);
    for (int first = 0; first < of.rows; first += kWarp) {
      const int mine = first + lane;
      const bool is_visible = mine < of.rows && shows(of, mine);
      if (of.width < kElements * 4) {  // a row is a few packets: those of a thread
        if (is_visible) note_row(t, of, mine, 0, 1);
        __syncwarp();
        continue;
      }
      for (uint32_t rows = __ballot_sync(0xFFFFFFFFu, is_visible); rows != 0; rows &= rows - 1) {
        note_row(t, of, first + __ffs(static_cast<int>(rows)) - 1, lane, kWarp);
      }
    }
  }

  // Notes all packets of a tile of so many elements.
  __device__ void note_all(int t, int elements, int lane) {
    int place = lane == 0 ? atomicAdd(&count, (elements + kElements - 1) / kElements) : 0;
    place = __shfl_sync(0xFFFFFFFFu, place, 0);
    for (int packet = lane; packet * kElements < elements; packet += kWarp) {
      const int number = t * kThreads + packet;
      which_[number] = (1u << min(elements - packet * kElements, kElements)) - 1;
      found_[place + packet] = static_cast<uint16_t>(number);
    }
  }

  // Notes every `stride`-th packet of a visible row, from that number on.
  __device__ void note_row(int t, const TileRows& of, int row, int from, int stride) {
    const int begin = row == 0 ? 0 : of.first_end + (row - 1) * of.width;
    const int all = static_cast<int>(of.tile.count), row_end = of.first_end + row * of.width;
    const int end = min(all, row_end);
    for (int packet = begin / kElements + from; packet * kElements < end; packet += stride) {
      const int low = max(begin - packet * kElements, 0), high = min(end - packet * kElements, kElements);
      const uint32_t bits = ((1u << high) - 1) & ~((1u << low) - 1);
      const int number = t * kThreads + packet;
      // Rows that share a packet are one packet; the first to come puts it on the list.
      const bool is_new = atomicOr(&which_[number], bits) == 0;
      const uint32_t here = __activemask(), news = __ballot_sync(here, is_new);
      const int lane = threadIdx.x % kWarp, leader = __ffs(static_cast<int>(here)) - 1;
      int place = lane == leader && news != 0 ? atomicAdd(&count, __popc(news)) : 0;
      place = __shfl_sync(here, place, leader) + __popc(news & ((1u << lane) - 1));
      if (is_new) found_[place] = static_cast<uint16_t>(number);
    }
  }

  TileRows tiles_[kTilesOfRows];
  uint32_t which_[kPackets];
  uint16_t found_[kPackets];
};

}  // namespace pacer::kernels
