// The loop over elements on a GPU; null in a build without CUDA.
#pragma once

#include <pacer/kernels/adam.h>

extern decltype(pacer::kernels::UpdateLoops::cuda) const kLionCuda;
