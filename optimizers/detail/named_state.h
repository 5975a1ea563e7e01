// State of an optimizer by parameter name: "PARAMETER/group", "PARAMETER/step", "PARAMETER/exp_avg" ...,
// options as "group/0/lr" ..., and the version of all that as "state_version". Every parameter has a group
// and a step, so that a name that is missing on either side shows; the tensors exist from its first step on.
#pragma once

#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

NamedTensors export_state(const OptimizerTraits& traits, const ParamGroups& groups, const ParamStates& states,
                          const torch::optim::OptimizerOptions& defaults, const ParameterNames& names);

// Reads what export_state wrote, for the parameters of `groups`. Throws InvalidArgument that names the
// parameter where anything is missing, left over or does not fit. Tensors on the parameter's device become
// the state itself.
PendingState import_state(const OptimizerTraits& traits, const ParamGroups& groups,
                          const ParameterNames& names, const NamedTensors& state);

}  // namespace pacer::detail
