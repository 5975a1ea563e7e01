// What 1-bit Adam needs besides its loops over elements: the floors of the variance, from sums in the order
// of core/reduction_order.h, and the few numbers of a step.
#include <pacer/kernels/onebit_adam.h>

#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/onebit_compress.cuh>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {
namespace {

constexpr int kFloorThreads = 128;

// A warp per tensor.
__global__ void __launch_bounds__(kFloorThreads)
    tensor_sums_kernel(const OneBitFloors floors, const OneBitControl control) {
  const int64_t tensor = blockIdx.x * static_cast<int64_t>(kFloorThreads / kWarp) + threadIdx.x / kWarp;
  if (tensor >= floors.tensors || stands_still(control)) return;
  const TileRange units = floors.units[tensor];
  const double sum = sum_list_by_warp(floors.partials + units.first, units.count);
  if (threadIdx.x % kWarp == 0) floors.sums[tensor] = sum;
}

__global__ void __launch_bounds__(kFloorThreads)
    floors_kernel(const OneBitFloors floors, const OneBitControl control) {
  if (stands_still(control)) return;
  if (threadIdx.x == 0) {
    double total = 0;
    for (int64_t i = 0; i < floors.tensors; ++i) total += floors.sums[i];
    *floors.total = total;
  }
  __syncthreads();
  const double total = *floors.total;
  for (int64_t i = threadIdx.x; i < floors.tensors; i += kFloorThreads) {
    floors.floors[i] = variance_floor(floors.share, floors.sums[i], floors.counts[i], total, floors.elements);
  }
}

__global__ void joint_sum_kernel(const double* own, int64_t ranks, double weight, const double* averaged,
                                 double* total) {
  *total = joint_sum_of_squares(own, ranks, weight, *averaged);
}

}  // namespace

void onebit_floors_cuda(const OneBitFloors& floors, const OneBitControl& control, Stream stream) {
  const int64_t blocks = ceil_divide(floors.tensors, kFloorThreads / kWarp);
  if (blocks == 0) return;
  tensor_sums_kernel<<<static_cast<unsigned>(blocks), kFloorThreads, 0, stream>>>(floors, control);
  floors_kernel<<<1, kFloorThreads, 0, stream>>>(floors, control);
  check_launch("the floors of the variance");
}

void joint_sum_of_squares_cuda(const double* own, int64_t ranks, double weight, const double* averaged,
                               double* total, Stream stream) {
  joint_sum_kernel<<<1, 1, 0, stream>>>(own, ranks, weight, averaged, total);
  check_launch("the joint gradient norm");
}

}  // namespace pacer::kernels
