// Everything of modules: stacks of blocks, recomputation instead of keeping activations, and fused layers
// that compute in 16 bits or in 8-bit floats.
#pragma once

#include <pacer/modules/blocks.h>
#include <pacer/modules/fp8_options.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/layer_norm_linear.h>
#include <pacer/modules/layer_norm_mlp.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/replayed.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/modules/transformer_layer.h>
