// Parameters of the 1-bit optimizers in memory, as the CPU loops read and write them. A loop that holds a
// whole StoredElement of its own does not vectorise; one that goes through these functions does.
#pragma once

#include <cstdint>

#include <pacer/kernels/onebit_adam.h>

namespace pacer::kernels {

// Parameters from element `offset` of a tensor on, as fp32 without their rounding.
template <AdamStorage kStorage>
struct OneBitParameters {
  using Types = StorageOf<kStorage>;
  typename Types::Param* parameter;
  typename Types::Extra* extra;

  OneBitParameters(const OneBitAdamTensor& tensor, int64_t offset)
      : parameter(static_cast<typename Types::Param*>(tensor.parameter) + offset),
        extra(static_cast<typename Types::Extra*>(tensor.master_or_remainder)) {
    if constexpr (Types::kHasExtra) extra += offset;
  }
  PACER_HOST_DEVICE StoredElement<kStorage> load_stored(int64_t i) const {
    StoredElement<kStorage> e{};
    e.parameter = parameter[i];
    if constexpr (Types::kHasExtra) e.extra = extra[i];
    return e;
  }
  PACER_HOST_DEVICE float value(int64_t i) const { return load_parameter(load_stored(i)); }
  PACER_HOST_DEVICE void store_value(int64_t i, float value) const {
    StoredElement<kStorage> e = load_stored(i);
    store_parameter(value, 0, e);
    parameter[i] = e.parameter;
    if constexpr (Types::kHasExtra) extra[i] = e.extra;
  }
};

}  // namespace pacer::kernels
