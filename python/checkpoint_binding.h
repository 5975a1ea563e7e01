// Checkpoints of one process in C++'s layout, as operators: torch.ops.pacer.save_checkpoint, find_checkpoint
// and read_checkpoint. Names and tensors come from the package; whose they are is not known here.
#pragma once

#include <torch/library.h>

namespace pacer::python {

void register_checkpoints(torch::Library& library);

}  // namespace pacer::python
