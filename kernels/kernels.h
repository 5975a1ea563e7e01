// Everything of kernels: loops over raw pointers, on the CPU and on CUDA streams. No LibTorch.
#pragma once

#include <pacer/kernels/activation.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/fp8.h>
#include <pacer/kernels/lamb.h>
#include <pacer/kernels/layer_norm.h>
#include <pacer/kernels/math/activation.h>
#include <pacer/kernels/math/adam.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/arithmetic.h>
#include <pacer/kernels/math/dropout.h>
#include <pacer/kernels/math/element_type.h>
#include <pacer/kernels/math/fp8.h>
#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/math/half_types.h>
#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/math/layer_norm.h>
#include <pacer/kernels/math/onebit.h>
#include <pacer/kernels/math/onebit_adam.h>
#include <pacer/kernels/math/onebit_lamb.h>
#include <pacer/kernels/norm.h>
#include <pacer/kernels/onebit.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/kernels/onebit_lamb.h>
#include <pacer/kernels/onebit_layout.h>
#include <pacer/kernels/stream.h>
