// The norm kernels on the CPU over all gradients, as the optimizers call them before a step with the finite
// check.
#include <memory>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/norm.h>

#include "contenders.h"
#include "support/threads.h"

namespace bench::kernels {

Contender make_norm_on_cpu(const ModelData& data) {
  std::vector<int64_t> counts;
  for (const auto& gradient : data.gradients) counts.push_back(gradient.numel());
  auto units =
      std::make_shared<const std::vector<pacer::Tile>>(pacer::make_tiles(counts, pacer::kReductionUnit));
  auto partials = std::make_shared<std::vector<double>>(units->size());
  const at::Tensor norm = at::zeros({}, at::kFloat);
  return {[=, gradients = data.gradients] {
            run_parts(at::get_num_threads(), static_cast<int64_t>(units->size()),
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) {
                          const pacer::Tile& unit = (*units)[i];
                          (*partials)[i] = pacer::kernels::sum_of_squares_cpu(
                              pacer::kernels::GradientType::f32,
                              gradients[unit.tensor].const_data_ptr<float>() + unit.offset, unit.count);
                        }
                      });
            pacer::kernels::GradientCheck check{};
            pacer::kernels::finish_check_cpu(partials->data(), static_cast<int64_t>(partials->size()), {},
                                             &check);
            *norm.mutable_data_ptr<float>() = static_cast<float>(check.norm);
          },
          {norm}};
}

}  // namespace bench::kernels
