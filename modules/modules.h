// Everything of modules: stacks of blocks, also without memory, recomputation instead of keeping activations, attention inside a
// window, fused layers that compute in 16 bits or in 8-bit floats, decoders of them, a loss whose logits are never in
// memory, weights in 4 bits, low-rank adapters, and modules of TorchScript.
#pragma once

#include <pacer/modules/attention_window.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/deferred.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/fp8_options.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/head_exchange.h>
#include <pacer/modules/kept_operators.h>
#include <pacer/modules/layer_norm_linear.h>
#include <pacer/modules/layer_norm_mlp.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/linear_cross_entropy.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/lora_adapter.h>
#include <pacer/modules/lora_layer.h>
#include <pacer/modules/nf4.h>
#include <pacer/modules/nf4_weight.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/replayed.h>
#include <pacer/modules/rms_norm.h>
#include <pacer/modules/rotary.h>
#include <pacer/modules/script_module.h>
#include <pacer/modules/split_backward.h>
#include <pacer/modules/sync_batch_norm.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/modules/transformer_layer.h>
#include <pacer/modules/with_head.h>
