// What the ranks of a 1-bit optimizer exchange, and with whom: its settings, and what follows from them for
// these ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <pacer/compression/detail/onebit_route.h>
#include <pacer/optimizers/detail/onebit_settings.h>

namespace pacer::detail {

struct OneBitSetup : OneBitSettings {
  kernels::UpdateRule rule;
  OneBitRoute route;

  bool exchanges() const { return one_bit() && (route.workers() > 1 || compress_alone()); }
  // The numbers of the tensors with which buckets begin; there is one bucket where nothing is exchanged.
  std::vector<int64_t> first_of_buckets(const std::vector<OneBitTensor>& tensors) const {
    return detail::first_of_buckets(tensors, exchanges() ? bucket_bytes() : std::nullopt);
  }
};

}  // namespace pacer::detail
