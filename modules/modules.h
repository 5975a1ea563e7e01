// Everything of modules: stacks of blocks, and recomputation instead of keeping activations.
#pragma once

#include <pacer/modules/blocks.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/replayed.h>
#include <pacer/modules/tensor_call.h>
