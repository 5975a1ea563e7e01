// What is asked of parameters and gradients that are added over ranks, in buckets or in parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>

namespace pacer::detail {

// Throw InvalidArgument that names the parameter: it is defined, and on the device of the ranks; its gradient
// is dense.
void check_reducible(const std::string& name, const at::Tensor& parameter, const Communicator& world);
void check_dense(const std::string& name, const at::Tensor& gradient);
// Throws InvalidArgument that names the first of those, of `count` parameters, that backward did not reach.
void require_all_reached(const std::vector<std::string>& missed, size_t count);
// Throws CommunicationError where ranks that have dropped a window have sent different numbers of `what` ("buckets")
// in it. Blocks, as all ranks take part.
void require_same_sent(Communicator& ranks, const char* what, int64_t sent);

}  // namespace pacer::detail
