#include <pacer/optimizers/detail/cut_state.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/state_fields.h>

namespace pacer::detail {

at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ParameterRange& range,
                        const std::string& name) {
  if (tensor.sizes() == parameter.sizes()) {
    return tensor.reshape({-1}).narrow(0, range.first, range.count).clone();
  }
  require(tensor.sizes() == at::IntArrayRef(range.count), "the state of parameter ", InMessage{name},
          " has shape ", tensor.sizes(), ", but it can only be that of the whole parameter, ",
          parameter.sizes(), ", or of the ", range.count, " elements that this rank updates");
  return tensor;
}

void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ParameterRange& range,
               const std::string& name) {
  for (const StateField& field : kStateFields) {
    at::Tensor& tensor = (state.*field.get)();
    if (!tensor.defined() || field.kind == StateKind::trust_average) continue;
    tensor = cut_to_range(tensor, parameter, range, name);
  }
}

}  // namespace pacer::detail
