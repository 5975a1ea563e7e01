// Names by tensor that outlive no tensor's address.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// Keeps a tensor's address from being given to another tensor, but not the tensor's memory.
using HeldAddress = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What tensors are called, by TensorImpl. No other tensor can come to an address that is in here, and with it
// to the name of one that is gone.
using TensorNames = std::unordered_map<const void*, std::pair<HeldAddress, std::string>>;

}  // namespace pacer::detail
