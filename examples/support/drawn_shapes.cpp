#include "support/drawn_shapes.h"

#include <ATen/ATen.h>

namespace examples {

DrawnShapes draw_shapes(int64_t count) {
  const auto kinds = at::randint(kShapeKinds, {count}, at::kLong);
  const auto size = at::empty({count, 1, 1}).uniform_(3, 7);
  const auto place = [&] { return at::empty({count, 1, 1}).uniform_(7, kShapeSide - 7); };
  const auto along = at::arange(kShapeSide, at::kFloat);
  const auto x = along.view({1, 1, kShapeSide}) - place(), y = along.view({1, kShapeSide, 1}) - place();
  const auto far = (x * x + y * y).sqrt(), wide = at::max(x.abs(), y.abs()),
             narrow = at::min(x.abs(), y.abs());
  const auto shapes = at::stack({far < size, wide < 0.9 * size, (wide < size).logical_and(narrow < 1.5),
                                 (far < size).logical_and(far > size - 2)})
                          .to(at::kFloat);  // [kShapeKinds, count, kShapeSide, kShapeSide]
  const auto chosen = shapes.index({kinds, at::arange(count)});
  return {chosen + 0.25 * at::randn_like(chosen), kinds};
}

}  // namespace examples
