// State by name, the form in which checkpoints hold it: optimizer state as "PARAMETER/exp_avg", options as
// "group/0/lr", hook state as the hook's own keys. A number is a tensor without dimensions on the CPU.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace pacer {

// Tensors by name.
using NamedTensors = std::map<std::string, at::Tensor>;

// fp64, int64 and bool tensors without dimensions.
at::Tensor number_tensor(double value);
at::Tensor number_tensor(int64_t value);
at::Tensor number_tensor(bool value);

// Each in memory of its own.
NamedTensors copies_of(const NamedTensors& tensors);

// The tensor of that name; throws InvalidArgument naming it where there is none.
const at::Tensor& require_tensor(const NamedTensors& state, const std::string& name);

// The number of that name (double, int64_t or bool); throws InvalidArgument naming it where there is none or
// it is not a tensor of that dtype without dimensions.
template <class Number>
Number require_number(const NamedTensors& state, const std::string& name);
extern template double require_number<double>(const NamedTensors&, const std::string&);
extern template int64_t require_number<int64_t>(const NamedTensors&, const std::string&);
extern template bool require_number<bool>(const NamedTensors&, const std::string&);

}  // namespace pacer
