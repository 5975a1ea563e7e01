// Reading and writing optimizers in the archive layout of torch::optim (state by label, parameter groups by
// position), and taking state over from a running optimizer. A load validates everything first, then swaps:
// on any error the optimizer is untouched.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// State and options for every group of an optimizer, read but not yet in force.
struct PendingState {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  // by group
  ParamStates states;  // by TensorImpl of the parameters here
};

// Throws InvalidArgument unless options and state are sound and fit the parameters.
void check_pending(const PendingState& pending, const AdamFlavour& flavour, const ParamGroups& groups,
                   const ParameterNames& names);

// Puts pending state in force. Does not throw.
void commit_pending(PendingState pending, ParamGroups& groups, ParamStates& states) noexcept;

// Reads an archive of this optimizer or of torch's. Labels in the archive are addresses of another run and
// only join state to position.
template <class State, class Options>
PendingState read_optimizer(torch::serialize::InputArchive& archive, const char* optimizer,
                            const ParamGroups& groups) {
  PendingState pending;
  ParamStates labelled;
  std::vector<std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>>
      saved_groups;
  try {
    torch::serialize::InputArchive state_archive, groups_archive;
    archive.read("state", state_archive);
    torch::optim::detail::serialize<State>(state_archive, labelled);
    archive.read("param_groups", groups_archive);
    torch::optim::detail::serialize<Options>(groups_archive, saved_groups);
    for (const auto& group : saved_groups) {
      for (const std::string& label : group.first) std::stoull(label);  // throws where it is not an address
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw InvalidArgument(concatenate(optimizer,
                                      ": this archive does not hold the state of such an optimizer (",
                                      text.substr(0, text.find('\n')), "); nothing was loaded"));
  }
  require(saved_groups.size() == groups.size(), optimizer, ": the archive has ", saved_groups.size(),
          " parameter groups but the optimizer has ", groups.size(), "; nothing was loaded");
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& labels = saved_groups[g].first;
    const auto& parameters = groups[g].params();
    require(labels.size() == parameters.size(), optimizer, ": group ", g, " has ", labels.size(),
            " parameters in the archive but ", parameters.size(), " in the optimizer; nothing was loaded");
    pending.options.push_back(std::move(saved_groups[g].second));
    for (size_t i = 0; i < labels.size(); ++i) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the label is the address the parameter had when it was
      // saved
      const auto found = labelled.find(reinterpret_cast<void*>(std::stoull(labels[i])));
      if (found == labelled.end()) continue;
      require(found->second != nullptr, optimizer, ": the archive names the state of parameter ", g, ".", i,
              " twice; nothing was loaded");
      pending.states[parameters[i].unsafeGetTensorImpl()] = std::move(found->second);
    }
  }
  return pending;
}

// Options, moments and step counts of a torch optimizer over the same parameters, copied.
template <class State, class TorchState>
PendingState copy_of_torch_optimizer(const torch::optim::Optimizer& source, const AdamFlavour& flavour,
                                     const ParamGroups& groups, const ParameterNames& names) {
  const ParamGroups& source_groups = source.param_groups();
  require(source_groups.size() == groups.size(), flavour.name, ": the optimizer to take over from has ",
          source_groups.size(), " parameter groups but this one has ", groups.size());
  PendingState pending;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& theirs = source_groups[g].params();
    const auto& ours = groups[g].params();
    require(theirs.size() == ours.size(), flavour.name, ": group ", g, " has ", theirs.size(),
            " parameters in the optimizer to take over from but ", ours.size(), " here");
    pending.options.push_back(flavour.adopt(source_groups[g].options()));
    require(pending.options.back() != nullptr, flavour.name,
            ": the options to take over belong to another optimizer");
    for (size_t i = 0; i < ours.size(); ++i) {
      require(theirs[i].is_same(ours[i]), flavour.name, ": parameter ", name_of(names, ours[i], g, i),
              " is another tensor in the optimizer to take over from; build both from the same parameters");
      const auto found = source.state().find(theirs[i].unsafeGetTensorImpl());
      if (found == source.state().end()) continue;
      const auto& torch_state = static_cast<const TorchState&>(*found->second);
      const auto copy = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; };
      auto state = std::make_unique<State>();
      state->step(torch_state.step());
      state->exp_avg(copy(torch_state.exp_avg())).exp_avg_sq(copy(torch_state.exp_avg_sq()));
      state->max_exp_avg_sq(copy(torch_state.max_exp_avg_sq()));
      pending.states[ours[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  return pending;
}

}  // namespace pacer::detail
