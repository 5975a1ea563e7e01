#include "lion_cuda.h"

decltype(pacer::kernels::UpdateLoops::cuda) const kLionCuda = nullptr;
