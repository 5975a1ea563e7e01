// State of parameters of which ranks share the work: each keeps it for its range only.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/parameter_range.h>
#include <pacer/optimizers/adam_param_state.h>

namespace pacer::detail {

// A state tensor of the whole parameter, or of this range already, as one of the range: dense, on the same
// device, and no view of the whole one. Throws InvalidArgument for any other.
at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ParameterRange& range,
                        const std::string& name);
// The same for all of a parameter's state.
void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ParameterRange& range,
               const std::string& name);

}  // namespace pacer::detail
