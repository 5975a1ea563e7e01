// Named tensors as a dictionary of Python, and back.
#pragma once

#include <string>

#include <ATen/core/Dict.h>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::python {

using Tensors = c10::Dict<std::string, at::Tensor>;

inline Tensors to_dict(const NamedTensors& tensors) {
  Tensors dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

inline NamedTensors from_dict(const Tensors& dict) {
  NamedTensors tensors;
  for (const auto& item : dict) tensors[item.key()] = item.value();
  return tensors;
}

}  // namespace pacer::python
