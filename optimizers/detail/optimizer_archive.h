// Reading and writing optimizers in the archive layout of torch::optim (state by label, parameter groups by
// position), and taking state over from a running optimizer. A load validates everything first, then swaps:
// on any error the optimizer is untouched.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

// State and options for every group of an optimizer, read but not yet in force.
struct PendingState {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  // by group
  ParamStates states;  // by TensorImpl of the parameters here
};

// The options as the optimizer's own type, checked; what torch's lack is as in `own`. Throws InvalidArgument
// where they belong to another optimizer.
std::unique_ptr<torch::optim::OptimizerOptions> adopt(const OptimizerTraits& traits,
                                                      const torch::optim::OptimizerOptions& options,
                                                      const torch::optim::OptimizerOptions& own,
                                                      size_t group);

// Throws InvalidArgument unless options and state are sound and fit the parameters.
void check_pending(const PendingState& pending, const OptimizerTraits& traits, const ParamGroups& groups,
                   const ParameterNames& names);

// Puts pending state in force. Does not throw.
void commit_pending(PendingState pending, ParamGroups& groups, ParamStates& states) noexcept;

// Writes options and states in the layout of LibTorch's optimizers.
void write_optimizer(torch::serialize::OutputArchive& archive, const OptimizerTraits& traits,
                     const ParamGroups& groups, const ParamStates& states,
                     const torch::optim::OptimizerOptions& defaults);

// Reads an archive of this optimizer or of torch's; what torch's lacks stays as it is in `groups`. Labels in
// the archive are addresses of another run and only join state to position.
PendingState read_optimizer(torch::serialize::InputArchive& archive, const OptimizerTraits& traits,
                            const ParamGroups& groups, const torch::optim::OptimizerOptions& defaults);

// Options, moments and step counts of a torch optimizer over the same parameters, copied; what its options
// lack stays as it is in `groups`.
template <class TorchState>
PendingState copy_of_torch_optimizer(const torch::optim::Optimizer& source, const OptimizerTraits& traits,
                                     const ParamGroups& groups,
                                     const torch::optim::OptimizerOptions& defaults,
                                     const ParameterNames& names);

}  // namespace pacer::detail
