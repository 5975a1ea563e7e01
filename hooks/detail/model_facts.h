// Facts about a model and its optimizer: parameters with their names, and what all ranks must have alike.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/agreement.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/detail/parameter_list.h>

namespace pacer::detail {

// In the order of groups and registration; names are the optimizer's, else the model's, else "group.index".
std::vector<std::pair<std::string, at::Tensor>> named_optimizer_parameters(const SessionParts& parts);
// The same in the order in which the model has registered them, which is roughly that of forward passes, however groups
// have sorted them; then what the model does not have.
std::vector<std::pair<std::string, at::Tensor>> named_in_model_order(const SessionParts& parts);
std::vector<at::Tensor> all_optimizer_parameters(const SessionParts& parts);
// Those that need a gradient.
std::vector<at::Tensor> trained_parameters(const SessionParts& parts);
// Returns the rates of all groups, as their options answer; LibTorch throws for options without a rate.
std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer);

// ---- What ranks compare. ----

// See parameter_list.h; names are those of named_optimizer_parameters.
std::vector<Fact> parameter_facts(const SessionParts& parts);
// The same of what the model has beside them and the ranks share: other parameters, codes and scales of
// weights in 4 bits, and, where asked for, all other buffers.
std::vector<Fact> other_facts(const SessionParts& parts, bool with_buffers);
// The optimizer's type and all numbers of its groups. Optimizers that are neither pacer's nor known to
// torch_optimizer_state.h show their learning rates only.
std::vector<Fact> optimizer_facts(const torch::optim::Optimizer& optimizer);
// A checksum of these numbers, in hexadecimal digits.
std::string checksum_of_numbers(const torch::optim::Optimizer& optimizer);

// Rank 0's values for all, in few messages: tensors of one dtype travel together. Tensors that are not
// defined are passed over; a tensor listed twice travels once.
void broadcast_all(Communicator& world, const std::vector<at::Tensor>& tensors);

}  // namespace pacer::detail
