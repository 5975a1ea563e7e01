// One parameter, or a range of its elements, as the engine sees it: where its value, gradient and state lie,
// and in which dtype set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/parameter_range.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/state_fields.h>

namespace pacer::detail {

// The gradient of a leaf, undefined where there is none. What parameter.grad() also does takes longer than
// that: it asks whether the tensor is a leaf, for a warning.
inline const at::Tensor& gradient_of(const at::Tensor& leaf) { return leaf.unsafeGetTensorImpl()->grad(); }

struct ParameterEntry {
  at::Tensor parameter;
  std::string name;
  size_t group = 0;
  ParameterRange range;       // what of the parameter this optimizer updates; mostly all of it
  int64_t first_element = 0;  // real elements registered before these
  kernels::AdamStorage storage = kernels::AdamStorage::f32;
  bool amsgrad = false;
  bool has_first_moment = true;
  bool has_second_moment = true;
  bool starts_at_gradient = false;
  bool averages_trust = false;
  int64_t state_bits = 32;           // of moments
  std::optional<MuonSettings> muon;  // of its group
  bool is_compressed = false;        // the CompressedParameters update it, not a DtypeTable
  // Its number in the DirectionExchange, to which this rank brings a direction of its own gradient.
  std::optional<size_t> exchanged;
  FusedAdamStateFields* state = nullptr;

  // Kernels need one dense piece of memory in the same order for value, gradient and state. A parameter with
  // gaps between its elements, and a gradient in another order, go through dense copies of them.
  at::Tensor dense_parameter;  // undefined where the parameter itself is dense
  at::Tensor dense_gradient;   // undefined until it is needed
  // What the state tensors look like: the dense memory of a whole parameter, else a vector of its range.
  at::Tensor memory;

  // Paged: where in host memory the state lies (HostSegments), in elements of each field.
  std::optional<size_t> host_segment;
  int64_t host_offset = 0;

  // Where the entry sits in the tables of its dtype set, or in the CompressedParameters, and which scalars it
  // uses.
  size_t table = 0;
  size_t position = 0;
  int64_t step_group = 0;

  // Undefined where there is none.
  const at::Tensor& gradient() const {
    return range.gradient.defined() ? range.gradient : gradient_of(parameter);
  }
  // Where the values are that it updates, or a range of them.
  const at::Tensor& values() const { return range.values.defined() ? range.values : parameter; }
  const at::Tensor& dense() const { return dense_parameter.defined() ? dense_parameter : parameter; }

  // Whether its gradient may be this rank's alone. Ranks agree on something else then, and it takes part in
  // steps without a gradient, too.
  bool is_local() const { return is_compressed || exchanged.has_value(); }

  // Makes dense_parameter, where it is needed, and memory.
  void lay_out();

  // The range's first element in a tensor of the parameter's layout; null for an undefined one.
  const void* in_range(const at::Tensor& tensor) const;
};

// The strides of the parameter, or where it has gaps those of its dense copy.
std::vector<int64_t> dense_strides(const at::Tensor& parameter);

// Returns the type of gradients of parameters in that dtype set.
kernels::GradientType gradient_type(kernels::AdamStorage storage);

// Null for an undefined tensor.
void* pointer_of(const at::Tensor& tensor);

// True if both tensors have their elements at the same offsets.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// True where the gradient's memory does not hold its values in the parameter's order: other strides, or a
// view that is negated or zero in name only.
bool needs_dense_gradient(const ParameterEntry& entry, const at::Tensor& gradient);

// Throws InvalidArgument where an existing state tensor has another shape than that of the parameter needs, or is not
// made of numbers that a moment can be. `part`: what has an element for each of the parameter's has so many only.
void check_state(const FusedAdamStateFields& state, at::IntArrayRef parameter, std::optional<int64_t> part,
                 const std::string& name);

}  // namespace pacer::detail
