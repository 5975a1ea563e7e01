// The state of a parameter that takes another one's place with some of its rows and new ones beside them.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/row_room.h>

namespace pacer::detail {

// Row i of the result has what `state` has for row rows[i] of `before`; where that is -1 it begins anew. `state` is one
// of the optimizer's own. Master copies and remainders follow `after` where its kept rows differ from `before`. The
// tensors lie where those of `state` do; moments in 8 bits become numbers, which the next step turns into codes.
std::unique_ptr<torch::optim::OptimizerParamState> state_of_rows(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state, const at::Tensor& before,
    const at::Tensor& after, const at::Tensor& rows);

// What `state` has, and behind it the state of rows that begin anew with the values `more`. Moments in 8 bits become
// numbers, as above.
std::unique_ptr<torch::optim::OptimizerParamState> state_with_more_rows(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state, const at::Tensor& more,
    RowRoom& room);

}  // namespace pacer::detail
