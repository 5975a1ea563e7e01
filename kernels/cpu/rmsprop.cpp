// RMSprop in the CPU loop of element_loop.h.
#include <pacer/kernels/rmsprop.h>

#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {

const UpdateLoops& rmsprop_update(bool has_momentum, bool is_centered) {
  static const UpdateLoops plain{all_elements_cpu<RmspropRule<false, false>>, rmsprop_cuda};
  static const UpdateLoops momentum{all_elements_cpu<RmspropRule<true, false>>, rmsprop_momentum_cuda};
  static const UpdateLoops centered{all_elements_cpu<RmspropRule<false, true>>, centered_rmsprop_cuda};
  static const UpdateLoops both{all_elements_cpu<RmspropRule<true, true>>, centered_rmsprop_momentum_cuda};
  if (is_centered) return has_momentum ? both : centered;
  return has_momentum ? momentum : plain;
}

}  // namespace pacer::kernels
