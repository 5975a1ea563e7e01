// Optimizer state that lives in pinned host memory and passes through the GPU in pages: for models whose
// state does not fit beside weights and activations, at the speed of the copies.
//
//   const auto paging = pacer::Paging().resident_bytes(256 << 20);
//   pacer::FusedAdamW optimizer(model->parameters(), pacer::FusedAdamWOptions(2e-4).paged(paging));
//
// A step updates page after page while the next ones come and the former ones go, by copies of their own
// streams and without managed memory. Kernels and bits are those of an optimizer that is not paged.
// docs/paging.md says when it pays.
#pragma once

#include <cstdint>

#include <torch/arg.h>

namespace pacer {

// What paged() of FusedAdamOptions, FusedAdamWOptions, FusedLambOptions, FusedSgdOptions and FusedRmspropOptions takes. It
// is about the optimizer as a whole: it is taken from the options that the optimizer is made with, is neither saved nor compared
// between ranks, and a group's own options may only repeat it.
struct Paging {
  // Bytes of state that stay on the GPU between steps, so that they need no copies: whole tensors in the
  // order of the parameters, as many as fit; 0 for none. Host memory has room for them, too.
  TORCH_ARG(int64_t, resident_bytes) = 0;
  // Gives resident state up, for good, where training runs out of GPU memory otherwise: when LibTorch's
  // allocator finds no block in its cache and the GPU has less than `headroom` bytes left, state moves to
  // host memory until there are so many. From the next step on it passes through in pages.
  TORCH_ARG(bool, on_pressure) = false;
  // The bytes of GPU memory that on_pressure makes free: at least the largest single block that training asks
  // for.
  TORCH_ARG(int64_t, headroom) = int64_t{2} << 30;
  // Bytes of state that are copied at a time, at least 4,096. Three pages are on the GPU at once. Pages of
  // FusedLamb hold whole tensors, and are as large as the largest one needs.
  TORCH_ARG(int64_t, page_bytes) = int64_t{32} << 20;
};

inline bool operator==(const Paging& a, const Paging& b) {
  return a.resident_bytes() == b.resident_bytes() && a.on_pressure() == b.on_pressure() &&
         a.headroom() == b.headroom() && a.page_bytes() == b.page_bytes();
}

}  // namespace pacer
