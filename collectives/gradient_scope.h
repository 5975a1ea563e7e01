// Names the ranks over which gradients are added before an optimizer sees them.
#pragma once

namespace pacer {

// The ranks over which a gradient is added.
enum class GradientScope {
  world,  // all
  node,   // those of this rank's node
  rank,   // none: they stay this rank's own
};

}  // namespace pacer
