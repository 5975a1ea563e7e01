// Parameters that no backward pass of a window has reached.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

// Throws InvalidArgument that names them where parameters of the optimizer that are trained have no gradient,
// as where buckets of gradients travel. `joined`: those that sit the step out, because no pass has seen them.
void check_all_reached(const SessionParts& parts, const std::vector<at::Tensor>& joined = {});

}  // namespace pacer::detail
