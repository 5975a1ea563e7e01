// A plain optimizer beside a paged one, on a simulated device that copies late.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/both_devices.h"
#include "support/optimizers/late_page_device.h"

namespace pacer::testing {

// A plain optimizer and a paged one over the same parameters.
template <class Optimizer>
struct PagedPair {
  std::vector<Tensor> plain, paged;
  Optimizer one;
  PagedOnHost<Optimizer> other;

  PagedPair(const std::vector<Tensor>& parameters, const OptionsOf<Optimizer>& options, const Paging& paging,
            unsigned seed = 1, int64_t room = int64_t{1} << 40)
      : plain(parameters),
        paged(moved_to(parameters, at::kCPU)),
        one(plain, options),
        other(paged, options, paging, seed, room) {}

  void set_gradients() { set_random_gradients(plain, paged); }
  void clear_gradient(size_t i) { plain[i].mutable_grad() = paged[i].mutable_grad() = Tensor(); }
  void step() {
    one.step();
    other.step();
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      set_gradients();
      step();
    }
  }
  std::string differs() {
    other.sync_state();
    return difference(snapshot(one), snapshot(other.base()));
  }
};

inline Paging paging_of(int64_t resident = 0) { return Paging().page_bytes(4096).resident_bytes(resident); }

constexpr int64_t kEverything = int64_t{1} << 30;

}  // namespace pacer::testing
