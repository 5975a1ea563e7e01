// What a kernel that writes 8-bit floats leaves behind on the CPU.
#pragma once

#include <algorithm>

#include <pacer/kernels/math/fp8.h>

namespace pacer::kernels {

// For a part of the tensor with that amax (bits), cast with that scale. Not for several threads at once.
inline void note_amax(const Fp8Target& to, uint32_t amax, float scale) {
  if (to.state != nullptr && to.records) to.state->amax = std::max(to.state->amax, amax);
  *to.inverse = float_of(std::max(bits_of(*to.inverse), inverse_bits(amax, scale)));
}

}  // namespace pacer::kernels
