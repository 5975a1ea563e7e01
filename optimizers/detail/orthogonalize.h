// The matrix products of Muon.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/muon_options.h>

namespace pacer::detail {

// Returns matrices (n, r, c) that are nearly orthogonal, with the singular vectors of those of the batch, times
// `scale`. Matrices of zeros stay zeros. By Newton and Schulz's iteration, all products in the batch's dtype. Where
// `into` is defined, they are written there and it is returned; it may be the memory of `matrices`.
at::Tensor orthogonalized(const at::Tensor& matrices, MuonCoefficients coefficients, int64_t iterations,
                          double scale, const at::Tensor& into = {});

}  // namespace pacer::detail
