// What DataParallel asks about model and optimizer: parameters with names, and facts that all ranks must
// share.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/agreement.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

// In the order of groups and registration; names are the optimizer's, else the model's, else "group.index".
std::vector<std::pair<std::string, at::Tensor>> named_optimizer_parameters(const SessionParts& parts);
std::vector<at::Tensor> all_optimizer_parameters(const SessionParts& parts);
// Those that need a gradient.
std::vector<at::Tensor> trained_parameters(const SessionParts& parts);
// Of all groups, as their options answer; LibTorch throws for options without a rate.
std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer);
bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

// Names, dtypes, shapes, groups, and whether they are trained; in order.
std::vector<Fact> parameter_facts(const SessionParts& parts);
// Names, dtypes and shapes of what the model has beside them and the ranks must share: frozen parameters, and
// codes and scales of weights in 4 bits.
std::vector<Fact> frozen_facts(const SessionParts& parts);
// Options of all groups but for the learning rate; other optimizers than pacer's, torch's and those of
// detail/foreign_state.h show their number of groups only.
std::vector<Fact> optimizer_facts(const SessionParts& parts);

// Rank 0's values for all, in few messages: tensors of one dtype travel together. Tensors that are not
// defined are passed over; a tensor listed twice travels once.
void broadcast_all(Communicator& world, const std::vector<at::Tensor>& tensors);

}  // namespace pacer::detail
