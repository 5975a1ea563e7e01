#include <pacer/optimizers/detail/onebit_errors.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

const at::Tensor& error_of(const NamedTensors& state, const std::string& key, const at::Tensor& parameter) {
  const at::Tensor& tensor = require_tensor(state, key);
  require(tensor.scalar_type() == at::kFloat && tensor.sizes() == parameter.sizes(), "\"", key,
          "\" of the state to load is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
          ", but the parameter has ", parameter.sizes());
  return tensor;
}

}  // namespace

at::Tensor in_memory_order(const at::Tensor& values, const at::Tensor& parameter) {
  const at::Tensor dense = at::empty_strided(parameter.sizes(), parameter.strides(), values.options());
  dense.copy_(values);
  return dense.as_strided({parameter.numel()}, {1});
}

JoinedErrors join_errors(const std::vector<NamedTensors>& rank_states, const std::string& name,
                         const at::Tensor& parameter) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  JoinedErrors joined{at::zeros(parameter.sizes(), options), at::zeros(parameter.sizes(), options)};
  std::vector<at::Tensor> parts;
  bool compressed = false;
  for (const NamedTensors& state : rank_states) {
    if (state.empty()) continue;
    // A single rank that did not compress, between a join and its next step.
    if (state.count(name + "/momentum_error") != 0) {
      joined.worker.add_(error_of(state, name + "/momentum_error", parameter));
      continue;
    }
    compressed = true;
    joined.worker.add_(error_of(state, name + "/worker_error", parameter));
    const auto part = state.find(name + "/server_error");
    if (part == state.end()) continue;
    require(part->second.scalar_type() == at::kFloat && part->second.dim() == 1, "\"", part->first,
            "\" of the state to load is no list of fp32 numbers");
    parts.push_back(part->second);
  }
  joined.worker.div_(static_cast<double>(rank_states.size()));
  if (!compressed || parameter.numel() == 0) return joined;
  // Chunks are in rank order, as the elements are in memory.
  const at::Tensor server = parts.empty() ? at::zeros({0}, options) : at::cat(parts).to(at::kDouble);
  require(server.numel() == parameter.numel(), "the server errors of parameter ", name,
          " in the state to load have ", server.numel(), " elements over all ranks, but the parameter has ",
          parameter.numel(), "; a rank's file is missing or of another run");
  joined.server = server.as_strided(parameter.sizes(), parameter.strides());
  return joined;
}

}  // namespace pacer::detail
