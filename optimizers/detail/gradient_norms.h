// Norms of any order over gradients, for clipping: beside the fused optimizers' own look at gradients, which has
// sums of squares of all of them together (kernels/norm.h).
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer {

class Communicator;

namespace detail {

// Returns (sum of |x|^p)^(1/p) over the elements of all gradients, or for p = infinity the largest |x|: fp64, no
// dimensions, on `device`, which is that of the gradients, or of most of them. 0 without elements; NaN or infinite
// where an element is. `gradients`: strided, of any floating-point or complex dtype. Sums on a CPU are fp64 in an
// order of their own, whatever the number of threads; on a GPU nothing waits for the device. Other orders than 1, 2
// and infinity divide by the largest magnitude first, so that no power of a usual gradient overflows.
// `ranks`: where each has a part of the gradients, all together with the same p; null: they are all here.
at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients, double p, at::Device device,
                         Communicator* ranks = nullptr);

}  // namespace detail
}  // namespace pacer
