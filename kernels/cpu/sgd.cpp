// SGD in the CPU loop of element_loop.h.
#include <pacer/kernels/sgd.h>

#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {

const UpdateLoops& sgd_update(SgdMomentum momentum) {
  static const UpdateLoops none{elements_cpu<SgdRule<SgdMomentum::none>>, sgd_cuda};
  static const UpdateLoops plain{elements_cpu<SgdRule<SgdMomentum::plain>>, sgd_momentum_cuda};
  static const UpdateLoops nesterov{elements_cpu<SgdRule<SgdMomentum::nesterov>>, sgd_nesterov_cuda};
  return momentum == SgdMomentum::none ? none : momentum == SgdMomentum::plain ? plain : nesterov;
}

}  // namespace pacer::kernels
