#include <pacer/optimizers/detail/onebit_errors.h>

#include <algorithm>
#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {
namespace {

const at::Tensor& error_of(const NamedTensors& state, const std::string& key, at::IntArrayRef sizes) {
  const at::Tensor& tensor = require_tensor(state, key);
  require(tensor.scalar_type() == at::kFloat && tensor.sizes() == sizes, "\"", key,
          "\" of the state to load is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
          ", but the parameter has ", sizes);
  return tensor;
}

}  // namespace

bool same_strides(at::IntArrayRef a, at::IntArrayRef b, at::IntArrayRef sizes) {
  if (a.size() != sizes.size() || b.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && a[d] != b[d]) return false;
  }
  return true;
}

int64_t errors_version(const NamedTensors& state) {
  return state.count(kErrorsVersion) == 0 ? 1 : require_number<int64_t>(state, kErrorsVersion);
}

void add_strides(const std::string& name, at::IntArrayRef sizes, at::IntArrayRef strides,
                 NamedTensors& state) {
  if (same_strides(strides, c10::contiguous_strides(sizes), sizes)) return;
  state[name + kStrides] = at::tensor(strides, at::kLong);
}

std::vector<int64_t> saved_strides(const NamedTensors& state, const std::string& name, at::IntArrayRef sizes,
                                   at::IntArrayRef now, int64_t version) {
  const auto found = state.find(name + kStrides);
  if (found == state.end()) {
    return version < 2 ? now.vec() : at::IntArrayRef(c10::contiguous_strides(sizes)).vec();
  }
  const at::Tensor& tensor = found->second;
  require(tensor.scalar_type() == at::kLong && tensor.dim() == 1 && tensor.device().is_cpu() &&
              tensor.numel() == static_cast<int64_t>(sizes.size()),
          "\"", found->first, "\" of the state to load are no strides of a parameter of shape ", sizes);
  const auto* numbers = tensor.const_data_ptr<int64_t>();
  return {numbers, numbers + tensor.numel()};
}

void require_same_order(NamedTensors& errors, const OneBitTensor& of, int64_t version) {
  require(same_strides(saved_strides(errors, of.name, of.sizes, of.strides, version), of.strides, of.sizes),
          "the state to load has the errors of parameter ", InMessage{of.name, of.sizes},
          " in another memory order than the parameter has here; give it the order that it had");
  errors.erase(of.name + kStrides);
}

at::Tensor in_memory_order(const at::Tensor& values, const OneBitTensor& of) {
  const at::Tensor dense = at::empty_strided(of.sizes, of.strides, values.options());
  dense.copy_(values);
  return dense.as_strided({of.count}, {1});
}

// The parts of a parameter lie one behind the other in the order of the ranks of a node. Those of server
// errors are cut again, each by the nodes in their order.
std::vector<NamedTensors> whole_errors(const std::vector<NamedTensors>& rank_states, int64_t ranks_per_worker,
                                       const std::vector<OneBitTensor>& whole) {
  const auto ranks_of_node = static_cast<size_t>(ranks_per_worker);
  const size_t nodes = rank_states.size() / ranks_of_node;
  std::vector<NamedTensors> states(nodes);
  const auto list = [&](const std::string& key, const std::vector<size_t>& ranks) {
    std::vector<at::Tensor> parts;
    for (const size_t rank : ranks) {
      const auto found = rank_states[rank].find(key);
      if (found == rank_states[rank].end()) continue;
      require(found->second.scalar_type() == at::kFloat && found->second.dim() == 1, "\"", key,
              "\" of the state to load is no list of fp32 numbers");
      parts.push_back(found->second);
    }
    return parts.empty() ? at::Tensor() : at::cat(parts);
  };
  for (const OneBitTensor& of : whole) {
    std::vector<size_t> by_part;
    for (size_t part = 0; part < ranks_of_node; ++part) {
      for (size_t node = 0; node < nodes; ++node) by_part.push_back(node * ranks_of_node + part);
    }
    for (size_t node = 0; node < nodes; ++node) {
      std::vector<size_t> of_node(ranks_of_node);
      std::iota(of_node.begin(), of_node.end(), node * ranks_of_node);
      for (const char* field : {"/worker_error", "/momentum_error"}) {
        const at::Tensor error = list(of.name + field, of_node);
        if (!error.defined()) continue;
        require(error.numel() == of.count, "the errors of parameter ", InMessage{of.name, of.sizes},
                " in the state to load have ", error.numel(),
                " elements over the ranks of a node, but the parameter has ", of.count,
                "; a rank's file is missing or of another run");
        states[node][of.name + field] = error.view(of.sizes);
      }
    }
    const at::Tensor server = list(of.name + "/server_error", by_part);
    if (server.defined()) states.front()[of.name + "/server_error"] = server;
  }
  for (NamedTensors& state : states) state[kErrorsVersion] = number_tensor(kStateVersion);
  return states;
}

JoinedErrors join_errors(const std::vector<NamedTensors>& rank_states, const OneBitTensor& of) {
  const std::string& name = of.name;
  const at::IntArrayRef sizes = of.sizes;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  JoinedErrors joined{at::zeros(sizes, options), at::zeros(sizes, options)};
  std::vector<at::Tensor> parts;
  std::vector<int64_t> strides = of.strides;
  bool compressed = false;
  for (const NamedTensors& state : rank_states) {
    if (state.empty()) continue;
    // A single rank that did not compress, between a join and its next step.
    if (state.count(name + "/momentum_error") != 0) {
      joined.worker.add_(error_of(state, name + "/momentum_error", sizes));
      continue;
    }
    if (!compressed) {
      strides = saved_strides(state, name, sizes, of.strides, errors_version(state));
    }
    compressed = true;
    joined.worker.add_(error_of(state, name + "/worker_error", sizes));
    const auto part = state.find(name + "/server_error");
    if (part == state.end()) continue;
    require(part->second.scalar_type() == at::kFloat && part->second.dim() == 1, "\"", part->first,
            "\" of the state to load is no list of fp32 numbers");
    parts.push_back(part->second);
  }
  joined.worker.div_(static_cast<double>(rank_states.size()));
  if (!compressed || of.count == 0) return joined;
  // Chunks are in rank order, as the elements are in memory.
  const at::Tensor server = parts.empty() ? at::zeros({0}, options) : at::cat(parts).to(at::kDouble);
  require(server.numel() == of.count, "the server errors of parameter ", InMessage{name, sizes},
          " in the state to load have ", server.numel(), " elements over all ranks, but the parameter has ",
          of.count, "; a rank's file is missing or of another run");
  const auto reach = [&] {
    int64_t last = 0;
    for (size_t d = 0; d < strides.size(); ++d) last += strides[d] * (sizes[d] - 1);
    return last;
  };
  const bool positive =
      std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride >= 0; });
  require(
      positive && reach() == of.count - 1 && server.as_strided(sizes, strides).is_non_overlapping_and_dense(),
      "\"", name, kStrides, "\" of the state to load are no strides of a parameter of shape ", sizes);
  joined.server = server.as_strided(sizes, strides);
  return joined;
}

void add_errors(const JoinedErrors& errors, const OneBitTensor& of, kernels::OneBitLayout::Part served,
                NamedTensors& state) {
  state[of.name + "/worker_error"] = errors.worker.to(at::kFloat);
  add_strides(of.name, of.sizes, of.strides, state);
  if (served.begin == served.end) return;
  state[of.name + "/server_error"] =
      in_memory_order(errors.server, of).narrow(0, served.begin, served.end - served.begin).to(at::kFloat);
}

}  // namespace pacer::detail
