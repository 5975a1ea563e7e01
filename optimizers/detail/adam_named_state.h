// State of FusedAdam and FusedAdamW by parameter name: "PARAMETER/group", "PARAMETER/step",
// "PARAMETER/exp_avg" ..., and options as "group/0/lr" ... Every parameter has a group and a step, so that a
// name that is missing on either side shows; the tensors exist from its first step on.
#pragma once

#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

NamedTensors export_adam(const AdamFlavour& flavour, const ParamGroups& groups, const ParamStates& states,
                         const ParameterNames& names);

// Reads what export_adam wrote, for the parameters of `groups`. Throws InvalidArgument that names the
// parameter where anything is missing, left over or does not fit. Copies every tensor.
PendingState import_adam(const AdamFlavour& flavour, const ParamGroups& groups, const ParameterNames& names,
                         const NamedTensors& state);

}  // namespace pacer::detail
