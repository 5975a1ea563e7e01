// The floating-point dtypes that activations, weights and their gradients have in memory.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/half_types.h>

namespace pacer::kernels {

enum class ElementType : uint32_t { f32, bf16, f16 };

// Calls visit(float{}), visit(BFloat16{}) or visit(Float16{}) and returns its result.
template <class Visit>
auto with_element(ElementType type, const Visit& visit) {
  switch (type) {
    case ElementType::bf16:
      return visit(BFloat16{});
    case ElementType::f16:
      return visit(Float16{});
    case ElementType::f32:
      break;
  }
  return visit(float{});
}

}  // namespace pacer::kernels
