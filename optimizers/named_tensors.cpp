#include <pacer/optimizers/named_tensors.h>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>

namespace pacer {
namespace {

template <class Number>
at::Tensor as_tensor(Number value) {
  at::Tensor tensor = at::empty({}, c10::CppTypeToScalarType<Number>::value);
  *tensor.mutable_data_ptr<Number>() = value;
  return tensor;
}

}  // namespace

at::Tensor number_tensor(double value) { return as_tensor(value); }
at::Tensor number_tensor(int64_t value) { return as_tensor(value); }
at::Tensor number_tensor(bool value) { return as_tensor(value); }

NamedTensors copies_of(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) copies.emplace(name, tensor.detach().clone());
  return copies;
}

const at::Tensor& require_tensor(const NamedTensors& state, const std::string& name) {
  const auto found = state.find(name);
  require(found != state.end() && found->second.defined(), "the state to load has no \"", name, "\"");
  return found->second;
}

template <class Number>
Number require_number(const NamedTensors& state, const std::string& name) {
  const at::Tensor& tensor = require_tensor(state, name);
  const at::ScalarType wanted = c10::CppTypeToScalarType<Number>::value;
  require(tensor.dim() == 0 && tensor.scalar_type() == wanted && tensor.device().is_cpu(), "\"", name,
          "\" of the state to load must be one ", wanted, " number on the CPU, not ", tensor.scalar_type(),
          " of shape ", tensor.sizes());
  return *tensor.const_data_ptr<Number>();
}

template double require_number<double>(const NamedTensors&, const std::string&);
template int64_t require_number<int64_t>(const NamedTensors&, const std::string&);
template bool require_number<bool>(const NamedTensors&, const std::string&);

}  // namespace pacer
