// The norm kernels on a GPU over all gradients, as the optimizers call them before a step with the finite
// check.
#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/norm.h>

#include "contenders.h"

namespace bench::kernels {
namespace {

// A copy in device memory, as bytes.
template <class T>
at::Tensor on_gpu(const std::vector<T>& values) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(values.size() * sizeof(T))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return bytes.to(at::kCUDA);
}

}  // namespace

Contender make_norm_on_cuda(const ModelData& data) {
  std::vector<int64_t> counts;
  std::vector<pacer::kernels::AdamGradient> pointers;
  for (const auto& gradient : data.gradients) {
    counts.push_back(gradient.numel());
    pointers.push_back({gradient.const_data_ptr(), 0});
  }
  const std::vector<pacer::Tile> tiles = pacer::make_tiles(counts, pacer::kReductionUnit);
  const auto unit_count = static_cast<int64_t>(tiles.size());
  int64_t longest = 0;
  for (const pacer::Tile& tile : tiles) longest = std::max<int64_t>(longest, tile.count);
  const at::Tensor units = on_gpu(tiles);
  const at::Tensor gradients = on_gpu(pointers);
  const at::Tensor partials = at::zeros({unit_count}, at::TensorOptions(at::kCUDA).dtype(at::kDouble));
  const at::Tensor check = on_gpu(std::vector<pacer::kernels::GradientCheck>(1));
  const at::Tensor rule = on_gpu(std::vector<pacer::kernels::GuardRule>(1));
  const at::Tensor norm = check.view(at::kDouble).select(0, 1);  // GradientCheck::norm
  // The gradients are held so that the pointers stay valid.
  return {[=, held = data.gradients] {
            const auto stream = at::cuda::getCurrentCUDAStream();
            pacer::kernels::sum_of_squares_cuda(
                pacer::kernels::GradientType::f32, static_cast<const pacer::Tile*>(units.const_data_ptr()),
                unit_count, static_cast<const pacer::kernels::AdamGradient*>(gradients.const_data_ptr()),
                /*places=*/nullptr, static_cast<double*>(partials.mutable_data_ptr()), stream.stream(),
                longest);
            pacer::kernels::finish_check_cuda(
                static_cast<const double*>(partials.const_data_ptr()), unit_count,
                static_cast<const pacer::kernels::GuardRule*>(rule.const_data_ptr()),
                static_cast<pacer::kernels::GradientCheck*>(check.mutable_data_ptr()), stream.stream());
          },
          {norm}};
}

}  // namespace bench::kernels
