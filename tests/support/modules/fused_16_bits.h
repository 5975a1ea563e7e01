// Fused layers in 16 bits beside the same formulas of torch::nn in 16 bits, both measured by fp64.
#pragma once

#include <optional>

#include "support/catch.h"
#include "support/kernels/fused_reference.h"
#include "support/modules/autocast.h"

namespace pacer::testing::fused_layers {

// Of every layer that `prepare(layer)` has drawn numbers for, with parameters and stream in 16 bits or under autocast, the
// results are as exact as those of its parts, and gradients at most `bound(layer)` times as far off.
template <class Prepare, class Bound>
void check_16_bits(const Prepare& prepare, const Bound& bound) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool autocast : {true, false}) {
      for (const bool narrow_stream : {true, false}) {
        if (!autocast && !narrow_stream) continue;
        for_all_layers([&](auto layer) {
          CAPTURE(layer->name(), dtype, autocast, narrow_stream);
          prepare(*layer);
          const Tensor x = batch().to(dtype), in = narrow_stream ? x : x.to(at::kFloat);
          const Tensor dy = torch::randn(layer->forward(x.to(at::kFloat)).sizes()).to(dtype);
          if (!autocast) layer->to(dtype);
          const Pass exact = reference_pass(*layer, x.to(at::kFloat), dy.to(at::kDouble));
          Pass found, parts;
          {
            std::optional<Autocast> on;
            if (autocast) on.emplace(at::kCPU, dtype);
            found = fused_pass(*layer, in, dy);
            parts = pass(
                *layer, [&](const Tensor& t) { return reference(*layer, t); }, in, dy);
          }
          CHECK(relative_error(found.y, exact.y) <= 1.1 * relative_error(parts.y, exact.y));
          CHECK(largest_error(found, exact) <= bound(*layer) * largest_error(parts, exact));
          CHECK(found.dx.scalar_type() == in.scalar_type());
          for (const auto& [name, gradient] : found.gradients) {
            CHECK(gradient.scalar_type() == (autocast ? at::kFloat : dtype));
          }
        });
      }
    }
  }
}

}  // namespace pacer::testing::fused_layers
