// The look at gradients of which some are this worker's alone, whose noise does not cancel, and the others have
// been added over the ranks.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <pacer/compression/detail/onebit_route.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

// The guard looks at all stored gradients as if those of the workers had been added. `sums`: fp64, on the
// device, at least three: the third is the sum of squares of this worker's own, the first two are written.
// `averaged`: partial sums of squares of all others, on the device. `route`: who the workers are; null where
// the third is of gradients that were added, too. `local_weight` as in StepInputs, 1 where there is no route.
void look_jointly(GradientGuard& guard, const at::Tensor& sums, const OneBitRoute* route, double local_weight,
                  const double* averaged, int64_t count);

// *sum (on the device) = the sum of so many partials there.
void add_partials(at::Device device, const double* partials, int64_t count, double* sum);

}  // namespace pacer::detail
