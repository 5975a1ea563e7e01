// State of LibTorch's own optimizers by parameter name, in the form of SessionOptimizer::export_state.
#pragma once

#include <functional>

#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/option_numbers.h>
#include <pacer/optimizers/named_tensors.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer::detail {

// Behind the key of a tensor that a state may lack: whether it is there, a bool.
inline constexpr char kExists[] = "/exists";

// True for torch::optim::Adam, AdamW, SGD, RMSprop and Adagrad.
bool can_export(const torch::optim::Optimizer& optimizer);

// Shows the numbers of a group's options; false where they are of none of these optimizers.
bool visit_numbers(const torch::optim::OptimizerOptions& options, NumberVisitor& visit);

// Parameters are called as the model calls them, else "group.index".
NamedTensors export_torch_state(const torch::optim::Optimizer& optimizer, const torch::nn::Module& model);

// Throws InvalidArgument that names the parameter where anything is missing, left over or does not fit, and
// changes nothing; calling what it returned puts the state in force, once.
std::function<void()> prepare_torch_state(torch::optim::Optimizer& optimizer, const torch::nn::Module& model,
                                          const NamedTensors& state);

}  // namespace pacer::detail
