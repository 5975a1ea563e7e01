// The rules of schedulers/ for the package: torch.classes.pacer.SequenceLength, which cuts batches, and the
// operator torch.ops.pacer.layer_drop_gate.
#pragma once

#include <torch/library.h>

namespace pacer::python {

void register_schedules(torch::Library& library);

}  // namespace pacer::python
