// Tensors of a model that share memory without being one tensor: whoever loads values into both has to know.
#pragma once

#include <string>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// The two names, as the beginning of a sentence, where two tensors of `own` share memory and cannot both have
// their `values`, of which the last to be copied would win; empty where all can. Names without a value are
// passed over, and so are names of one tensor.
std::string conflict_in_memory(const NamedTensors& own, const NamedTensors& values);

}  // namespace pacer::detail
