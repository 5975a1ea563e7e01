// What users choose of the arithmetic of kernels. Options of layers and of collectives have these choices, so
// their names are those of pacer itself, and this header brings no kernels.
#pragma once

#include <cstdint>

namespace pacer {

// The activation between the two linear layers of a transformer's MLP.
enum class Activation : uint32_t {
  gelu,    // its tanh approximation
  swiglu,  // silu(gate) * up, where the gate's columns come first (Shazeer, arXiv:2002.05202)
};

// How the rows before a linear layer are normalised.
enum class Normalization : uint32_t {
  layer,  // by mean and variance, then weight and bias (Ba et al., arXiv:1607.06450)
  rms,    // by the root of the mean square, then weight alone (Zhang and Sennrich, arXiv:1910.07467)
};

// What a sign stands for: the root of the mean square, or the mean magnitude.
enum class ScaleNorm : uint32_t { rms, l1 };

}  // namespace pacer
