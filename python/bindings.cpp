// What the Python package "pacer" calls: classes and operators of torch's registry, in the namespace pacer.
#include <torch/library.h>

#include "checkpoint_binding.h"
#include "communicator_binding.h"
#include "optimizer_binding.h"
#include "schedule_binding.h"

TORCH_LIBRARY(pacer, library) {
  pacer::python::register_communicator(library);
  pacer::python::register_optimizer(library);
  pacer::python::register_schedules(library);
  pacer::python::register_checkpoints(library);
}
