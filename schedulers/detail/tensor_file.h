// Named tensors as a safetensors file, and back.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <pacer/core/safetensors.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Writes the values of all tensors, copied to the host first where they are on a GPU. Throws InvalidArgument
// for a dtype that the format lacks.
void write_tensors(ByteSink& sink, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata = {});

// All tensors of a file, on the CPU, in memory of their own. Throws FileError where the file is not sound.
NamedTensors read_tensors(std::vector<char> bytes, const std::string& path);

}  // namespace pacer::detail
