// What of a model a checkpoint holds where frozen weights are left out, and how a run that goes on from it
// knows that it has the same ones.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Returns the model's part of a checkpoint: parameters and buffers that are on this rank, by name, in the
// model's memory; with SessionParts::saves_frozen off neither parameters that require no gradient nor weights
// in 4 bits.
NamedTensors saved_model(const SessionParts& parts);

// Returns the checksum of all tensors that saved_model leaves out, with their names and shapes: 32 bytes. It
// copies them to the host one by one.
at::Tensor frozen_checksum(const SessionParts& parts);

// The versions of tensors by their names: writing to one raises its version.
using TensorVersions = std::map<std::string, int64_t>;

// Returns the versions of the tensors that saved_model leaves out, and those of all tensors of the model.
TensorVersions frozen_versions(const SessionParts& parts);
TensorVersions model_versions(const SessionParts& parts);

}  // namespace pacer::detail
