// The errors of a 1-bit exchange over another number of ranks: what they were worth together.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// fp64, in the parameter's shape.
struct JoinedErrors {
  at::Tensor worker;  // the mean over ranks, added in their order
  at::Tensor server;  // of all chunks
};

// Of one parameter, from what OneBitEngine::export_errors left on each rank; zeros where ranks left
// nothing. Throws InvalidArgument that names what is missing or does not fit.
JoinedErrors join_errors(const std::vector<NamedTensors>& rank_states, const std::string& name,
                         const at::Tensor& parameter);

// The elements as a vector, in the order in which they lie in the parameter's memory, which has no gaps.
at::Tensor in_memory_order(const at::Tensor& values, const at::Tensor& parameter);

}  // namespace pacer::detail
