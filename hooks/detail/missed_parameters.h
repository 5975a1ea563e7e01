// Parameters that no backward pass of a window has reached.
#pragma once

#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

// Throws InvalidArgument that names them where parameters of the optimizer that are trained have no gradient,
// as where buckets of gradients travel.
void check_all_reached(const SessionParts& parts);

}  // namespace pacer::detail
