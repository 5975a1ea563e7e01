// The class torch.classes.pacer.Optimizer, which holds an optimizer of C++ together with its parameters, so
// that a step passes nothing: C++ reads the gradients of its own handles. Options come as numbers and names
// by the names of the C++ setters; the package knows which there are.
#pragma once

#include <torch/library.h>

namespace pacer::python {

// After register_communicator.
void register_optimizer(torch::Library& library);

}  // namespace pacer::python
