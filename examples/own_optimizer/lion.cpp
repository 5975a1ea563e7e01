// The loop over elements on the CPU, and the rule that the optimizer is made of.
#include "lion.h"

#include <pacer/kernels/cpu/element_loop.h>

#include "lion_cuda.h"
#include "lion_rule.h"

const pacer::OwnRule& lion_rule() {
  static const pacer::kernels::UpdateLoops loops{pacer::kernels::elements_cpu<LionRule>, kLionCuda};
  static const pacer::OwnRule rule("Lion", loops, LionRule::kSecondMoment);
  return rule;
}
