// Pictures for programs that shall need no files: drawn shapes that lie anywhere under noise.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace examples {

constexpr int64_t kShapeSide = 24;  // pixels
constexpr int64_t kShapeKinds = 4;  // discs, squares, crosses and rings

struct DrawnShapes {
  at::Tensor pixels;  // fp32 [count, kShapeSide, kShapeSide], light on dark
  at::Tensor kinds;   // int64 [count]
};

// Draws so many shapes of random kinds and sizes at random places, from LibTorch's generator of the CPU.
DrawnShapes draw_shapes(int64_t count);

}  // namespace examples
