// One macro: functions marked PACER_HOST_DEVICE compile for the host and, under nvcc, for the device as well.
// On the host they are always inlined, so that they take on the instruction set of the loop around them.
#pragma once

#if defined(__CUDACC__)
#define PACER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PACER_HOST_DEVICE inline __attribute__((always_inline))
#endif
