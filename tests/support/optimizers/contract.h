// What a Session asks of an optimizer, for tests that do a Session's part: pacer's own classes keep it protected.
#pragma once

#include <pacer/optimizers/session_optimizer.h>

namespace pacer::testing {

inline SessionOptimizer& contract(SessionOptimizer& optimizer) { return optimizer; }
inline const SessionOptimizer& contract(const SessionOptimizer& optimizer) { return optimizer; }

}  // namespace pacer::testing
