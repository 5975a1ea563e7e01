// Folders with a file of tensors and a small file that says what they mean, which are replaced together.
#pragma once

#include <string>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

std::string path_in(const std::string& folder, const char* file);

// Writes both files, in place of what is there; the folder is made where it is missing. Each appears whole or not at all,
// and the disk has both when this returns. A program that dies in between leaves no tensors beside another config: there
// is none then. FileError.
void replace_weights_and_config(const std::string& folder, const char* weights, const NamedTensors& tensors,
                                const char* config, const std::string& text);

}  // namespace pacer::detail
