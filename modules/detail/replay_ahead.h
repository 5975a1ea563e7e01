// Recomputation before its gradient is there: while a rank waits for it, the region that needs it first can
// run again.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// Where `result` comes right out of a recomputed region (recompute.h) that was not run again yet, runs it
// again now, for the backward pass that must follow before anything else is computed; until then its
// activations are kept. Else does nothing.
void replay_ahead(const at::Tensor& result);

}  // namespace pacer::detail
