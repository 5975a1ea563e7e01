// Checkpoints in C++'s layout, as operators: torch.ops.pacer.save_checkpoint, which writes this rank's part
// of one, find_checkpoint, read_checkpoint, read_errors and agree. Names and tensors come from the package;
// whose they are is not known here.
#pragma once

#include <torch/library.h>

namespace pacer::python {

// After register_communicator.
void register_checkpoints(torch::Library& library);

}  // namespace pacer::python
