// What of a model a checkpoint holds where frozen weights are left out, and how a run that goes on from it
// knows that it has the same ones.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/named_tensors.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

// The model's part of a checkpoint: parameters and buffers that are on this rank, by name, in the model's
// memory; with
// SessionParts::saves_frozen off neither parameters that require no gradient nor weights in 4 bits.
NamedTensors saved_model(const SessionParts& parts);

// The checksum of all tensors that saved_model leaves out, with their names and shapes: 32 bytes. Copies them
// to the host one by one.
at::Tensor frozen_checksum(const SessionParts& parts);

// The same tensors by name, with their versions: writing to one raises it.
std::vector<std::pair<std::string, int64_t>> frozen_versions(const SessionParts& parts);

}  // namespace pacer::detail
