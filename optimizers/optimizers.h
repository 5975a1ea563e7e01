// Everything of optimizers: torch::optim::Optimizer subclasses over the kernels.
#pragma once

#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/fused_sgd.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/lamb_options.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/muon_options.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/named_tensors.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_lamb_options.h>
#include <pacer/optimizers/onebit_muon.h>
#include <pacer/optimizers/onebit_optimizer.h>
#include <pacer/optimizers/onebit_options.h>
#include <pacer/optimizers/optimizer_options.h>
#include <pacer/optimizers/own_rule.h>
#include <pacer/optimizers/paging.h>
#include <pacer/optimizers/session_optimizer.h>
#include <pacer/optimizers/sgd_options.h>
#include <pacer/optimizers/tensor_names.h>
