// Memory of a parameter that comes later: until then the parameter has its shape, dtype and device, and no values.
#pragma once

#include <cstddef>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>

namespace pacer::detail {

// Whoever asks for its memory gets a c10::Error with its sentence.
class DeferredStorage : public c10::StorageImpl {
 public:
  DeferredStorage(size_t bytes, c10::Device device, const std::string& sentence);
  // The values that the parameter shall have, as a checkpoint brought them; undefined: nobody knows them yet.
  at::Tensor value;
};

// Gives the parameter this device and dtype, and takes its memory. It stays the tensor that it is.
void defer(at::Tensor& parameter, const c10::TensorOptions& kind, const std::string& sentence);

// Gives freed host memory back to the system. The C library keeps it where small pieces in use lie between, so that blocks made
// one after the other would take the memory of all of them.
void return_freed_memory();

bool is_deferred(const at::Tensor& tensor);
// Returns the values that a deferred tensor shall have; undefined where nobody knows them yet.
at::Tensor& deferred_value(const at::Tensor& tensor);

}  // namespace pacer::detail
