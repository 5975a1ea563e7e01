// Schedule-Free AdamW in the CPU loop of element_loop.h.
#include <pacer/kernels/schedule_free.h>

#include <pacer/kernels/cpu/element_loop.h>

namespace pacer::kernels {

const UpdateLoops kScheduleFreeUpdate{elements_cpu<ScheduleFreeRule>, schedule_free_cuda};

}  // namespace pacer::kernels
