// Reading and writing optimizers, in the archive layout of torch::optim (state by label, parameter groups by
// position) and by name, and taking state over from a running optimizer. A load validates everything first,
// then swaps: on any error the optimizer is untouched.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// State and options for every group of an optimizer, read but not yet in force.
struct PendingState {
  PendingState() = default;
  // LibTorch's map allocates where another one is moved into a new one, and says that it does not throw. This
  // one throws where memory is short.
  // NOLINTNEXTLINE(performance-noexcept-move-constructor)
  PendingState(PendingState&& other) : PendingState() { *this = std::move(other); }
  PendingState& operator=(PendingState&& other) noexcept {
    options.swap(other.options);
    states.swap(other.states);
    return *this;
  }

  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  // by group
  ParamStates states;  // by TensorImpl of the parameters here
};

// Throws InvalidArgument unless options and state are sound and fit the parameters; else returns the settings
// that they mean.
std::vector<GroupSettings> check_pending(const PendingState& pending, const OptimizerView& own);

// Puts pending state in force; what was, is pending then. Does not throw.
void commit_pending(PendingState& pending, ParamGroups& groups, ParamStates& states) noexcept;

// A state of torch's Adam, AdamW, SGD or RMSprop as this optimizer's own, which shares its tensors; null where it is none.
std::unique_ptr<torch::optim::OptimizerParamState> adopted_state(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state);

// Writes options and states in the layout of LibTorch's optimizers, with the names that parameters were
// given.
void write_optimizer(torch::serialize::OutputArchive& archive, const OptimizerView& own);

// Reads an archive of this optimizer or of torch's; what torch's lacks stays as it is in `own`. Labels in
// the archive are addresses of another run and only join state to position. Where archive and optimizer both
// have names for a group, those decide, and positions where one has none.
PendingState read_optimizer(torch::serialize::InputArchive& archive, const OptimizerView& own);

// Options, moments and step counts of a torch optimizer over the same parameters, copied; what its options
// lack stays as it is in `own`.
template <class TorchState>
PendingState copy_of_torch_optimizer(const torch::optim::Optimizer& source, const OptimizerView& own);

// A copy of a parameter's state with zeros for the moments that the options of its group ask for since its last
// step, with which the next one would begin; null where it has all.
std::unique_ptr<torch::optim::OptimizerParamState> with_new_moments(const RegisteredParameter& parameter,
                                                                    const FusedAdamStateFields& state,
                                                                    const OptimizerView& own);

// State by parameter name: "PARAMETER/group", "PARAMETER/step", "PARAMETER/exp_avg" ..., options as
// "group/0/lr" ..., and the version of all that as "state_version". Every parameter has a group and a step,
// so that a name that is missing on either side shows; the tensors exist from its first step on. (In
// named_state.cpp, as the next.)
NamedTensors export_state(const OptimizerView& own);

// Reads the options alone, by group. Throws InvalidArgument for a state that another optimizer saved.
std::vector<GroupSettings> saved_settings(const NamedTensors& saved, const OptimizerView& own);

// Reads what export_state wrote, for the parameters of `own`. Throws InvalidArgument that names the parameter
// where anything is missing, left over or does not fit. Tensors on the parameter's device become the state
// itself.
PendingState import_state(const NamedTensors& saved, const OptimizerView& own);

// ---- State of parameters of which ranks share the work: each keeps it for its range only. ----

// A state tensor of the whole parameter, or of this range already, as one of the range: dense, on the same
// device, and no view of the whole one. Throws InvalidArgument for any other.
at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ParameterRange& range,
                        const std::string& name);
// The same for all of a parameter's state.
void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ParameterRange& range,
               const std::string& name);

}  // namespace pacer::detail
