// Where state tensors are made: on the parameters' device, or, paged, in host memory.
#pragma once

#include <vector>

#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class StateMemory {
 public:
  virtual ~StateMemory() = default;
  // Whether the entry's tensor, whose dtype and layout fit, may lie where it does.
  virtual bool may_stay(const ParameterEntry& entry, const at::Tensor& tensor) const = 0;
  // Zeros for a field of that dtype, one for each entry, in the layout of its memory.
  virtual std::vector<at::Tensor> make(const std::vector<ParameterEntry*>& entries, const StateField& field,
                                       at::ScalarType dtype) = 0;
};

// Gives every entry the state tensors its dtype set needs, in the layout of its memory and in dtype: new ones
// as zeros, master copies from the parameter's value, existing ones converted where they do not fit or may
// not stay. A compressed entry's momentum lies elsewhere; it gets none.
void prepare_state(std::vector<ParameterEntry>& entries, StateMemory& memory);
// The same with new ones in common arenas on the device of each parameter.
void prepare_state(std::vector<ParameterEntry>& entries);

// The dtype of a field of the entry; none where it has no such field.
std::optional<at::ScalarType> dtype_of(const ParameterEntry& entry, const StateField& field);

}  // namespace pacer::detail
