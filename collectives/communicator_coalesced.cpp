// Sums of many tensors in one operation.
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/communicator_state.h>
#include <pacer/collectives/detail/ordered_sum.h>
#include <pacer/collectives/detail/tensor_check.h>
#include <pacer/core/crc32c.h>
#include <pacer/core/tile.h>

namespace pacer {

using detail::bytes_of;
using detail::check_tensor;

namespace {

// Tensors that are rounded for the wire begin there at multiples of this, so that kernels may use wide
// accesses.
constexpr int64_t kWireAlignment = 128;  // elements

}  // namespace

void Communicator::compare_lists(const std::vector<at::Tensor>& tensors, const CollectiveOptions& options) {
  if (world_size() == 1 || options.agreed() || !state_->options().check_calls()) return;
  detail::CallRecord record;
  std::strncpy(record.operation, "all_reduce_coalesced", sizeof(record.operation) - 1);
  record.tensors = static_cast<int64_t>(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const int64_t numbers[] = {static_cast<int64_t>(tensor.scalar_type()), tensor.numel()};
    record.elements += tensor.numel();
    record.list =
        crc32c({reinterpret_cast<const char*>(numbers), sizeof(numbers)}, static_cast<uint32_t>(record.list));
  }
  state_->compare(record, state_->timeout_of(options));
}

bool Communicator::coalesces() const {
  return state_->connection().data->coalesces() && !state_->options().ordered_sum();
}

Work Communicator::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                        const CollectiveOptions& options) {
  for (const at::Tensor& tensor : tensors) check_tensor("all_reduce", "tensor", tensor, device());
  compare_lists(tensors, options);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) parts.push_back(tensor);
  }
  if (parts.empty()) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const int64_t world = world_size();
  if (state_->options().ordered_sum() && !transport->sums_in_rank_order()) {
    int64_t padded = 0;
    detail::OperationParts chain;
    for (const at::Tensor& tensor : parts) {
      padded += round_up(tensor.numel(), world) * static_cast<int64_t>(tensor.element_size());
      const detail::OperationParts sum =
          detail::ordered_all_reduce(transport, tensor, rank(), world_size(), timeout);
      chain.parts.insert(chain.parts.end(), sum.parts.begin(), sum.parts.end());
      chain.parts.emplace_back([after = sum.after]() -> detail::TransportWorkPtr {
        after();
        return nullptr;
      });
    }
    return state_->start("all_reduce", 2 * (world - 1) * padded / world, std::move(chain));
  }
  int64_t bytes = 0;
  for (const at::Tensor& tensor : parts) bytes += bytes_of(tensor);
  return state_->start("all_reduce", 2 * (world - 1) * bytes / world,
                       {{[=] { return transport->all_reduce_coalesced(parts, timeout); }}, nullptr});
}

Work Communicator::all_reduce_coalesced(const std::vector<at::Tensor>& tensors, at::ScalarType wire_dtype,
                                        const CollectiveOptions& options) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", "tensor", tensor, device());
    elements += round_up(tensor.numel(), kWireAlignment);
  }
  const at::TensorOptions on_wire = at::TensorOptions().dtype(wire_dtype).device(device());
  const at::Tensor wire = at::empty({elements}, on_wire);
  compare("all_reduce", wire, elements, 0, options);
  if (elements == 0) return {};
  std::vector<at::Tensor> rounded;  // pieces of `wire`
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    rounded.push_back(wire.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += round_up(tensor.numel(), kWireAlignment);
  }
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  detail::OperationParts chain = {{[=] { return transport->all_reduce(wire, timeout); }}, nullptr};
  if (state_->options().ordered_sum() && !transport->sums_in_rank_order()) {
    chain = detail::ordered_all_reduce(transport, wire, rank(), world_size(), timeout);
  }
  chain.parts.front() = [=, send = chain.parts.front()] {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(rounded, tensors);
    return send();
  };
  chain.after = [=, put_back = chain.after] {
    const at::NoGradGuard no_grad;
    if (put_back) put_back();
    at::_foreach_copy_(tensors, rounded);
  };
  return state_->start("all_reduce", 2 * (world_size() - 1) * bytes_of(wire) / world_size(),
                       std::move(chain));
}

}  // namespace pacer
