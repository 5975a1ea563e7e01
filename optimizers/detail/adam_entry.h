// One parameter as the engine sees it: where its value, gradient and state lie, in which dtype set, and what
// must not have changed since that was written down. Also creates and converts the state tensors themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/adam.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/detail/adam_flavour.h>

namespace pacer::detail {

struct AdamEntry {
  at::Tensor parameter;
  std::string name;
  size_t group = 0;
  int64_t first_element = 0;  // real elements registered before this parameter
  kernels::AdamStorage storage = kernels::AdamStorage::f32;
  bool amsgrad = false;
  bool averages_trust = false;
  FusedAdamStateFields* state = nullptr;

  // Kernels need one dense piece of memory in the same order for value, gradient and state. A parameter with
  // gaps between its elements, and a gradient in another order, go through these dense copies.
  at::Tensor dense_parameter;
  at::Tensor dense_gradient;
  bool gradient_is_dense = true;  // in this step, as it is

  // What the plan was built from.
  const void* parameter_data = nullptr;
  int64_t parameter_version = -1;
  at::Tensor state_tensors[6];  // held, so that no other tensor can take their addresses
  const void* state_data[6] = {};

  // Where the entry sits in the tables of its dtype set, and which scalars it uses.
  size_t table = 0;
  size_t position = 0;
  int64_t slot = -1;

  // The dense memory the kernel works on.
  const at::Tensor& memory() const { return dense_parameter.defined() ? dense_parameter : parameter; }

  // True while parameter and state tensors are where the plan has them.
  bool is_current() const;
  // Writes down what is_current compares with.
  void remember();

  // True if somebody else may have written to the parameter since remember_version.
  bool was_written() const { return parameter._version() != parameter_version; }
  void remember_version() { parameter_version = parameter._version(); }
};

// The moments' dtype in a dtype set.
at::ScalarType state_dtype(kernels::AdamStorage storage);

// Of gradients of parameters in that dtype set.
kernels::GradientType gradient_type(kernels::AdamStorage storage);

// Null for an undefined tensor.
void* pointer_of(const at::Tensor& tensor);

// True if both tensors have their elements at the same offsets.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// True where the gradient's memory does not hold its values in the parameter's order: other strides, or a
// view that is negated or zero in name only.
bool needs_dense_gradient(const AdamEntry& entry, const at::Tensor& gradient);

// Throws InvalidArgument where an existing state tensor has another shape than the parameter or is not made
// of numbers that a moment can be.
void check_state(const FusedAdamStateFields& state, const at::Tensor& parameter, const std::string& name);

// Gives every entry the state tensors its dtype set needs, in the parameter's layout, dtype and device: new
// ones as zeros in common arenas, master copies from the parameter's value, existing ones converted where
// they do not fit.
void prepare_state(std::vector<AdamEntry>& entries);

// After somebody wrote to the parameter: where the master copy no longer rounds to it, the parameter wins.
void follow_parameter(AdamEntry& entry);

}  // namespace pacer::detail
