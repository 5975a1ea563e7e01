#include <pacer/modules/detail/kept_results.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/stack.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <c10/core/TensorImpl.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

void add_tensor(const at::Tensor& tensor, std::vector<int64_t>& signature) {
  if (!tensor.defined() || tensor.is_nested()) return signature.push_back(-1);
  signature.push_back(tensor.dim());
  signature.insert(signature.end(), tensor.sizes().begin(), tensor.sizes().end());
  signature.push_back(static_cast<int64_t>(tensor.scalar_type()));
}

void add_value(const c10::IValue& value, std::vector<int64_t>& signature) {
  if (value.isTensor()) return add_tensor(value.toTensor(), signature);
  if (value.isInt()) return signature.push_back(value.toInt());
  if (value.isBool()) return signature.push_back(value.toBool() ? 1 : 0);
  if (value.isDouble()) {
    const double number = value.toDouble();
    int64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    return signature.push_back(bits);
  }
  if (value.isIntList()) {
    const std::vector<int64_t> numbers = value.toIntVector();
    signature.push_back(static_cast<int64_t>(numbers.size()));
    signature.insert(signature.end(), numbers.begin(), numbers.end());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) add_tensor(tensor, signature);
  } else {
    signature.push_back(-2);  // none, or what seldom differs
  }
}

std::vector<int64_t> signature_of(const OperatorCall& call) {
  std::vector<int64_t> signature;
  const size_t count = call.op.schema().arguments().size();
  for (const c10::IValue& value : torch::jit::last(call.stack, count)) add_value(value, signature);
  return signature;
}

// The device whose generator the call draws from.
at::Device device_of(const OperatorCall& call) {
  for (const c10::IValue& value : torch::jit::last(call.stack, call.op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      return value.toTensor().device();
    }
  }
  return at::kCPU;
}

bool is_same(const RandomState& a, const RandomState& b) {
  return a.cpu.equal(b.cpu) && (!a.cuda.defined() || a.cuda.equal(b.cuda));
}

// The same memory without a graph. One that is kept has the version of the result, to see changes in place; one that is
// handed out has its own, as a new result.
at::Tensor alias(const at::Tensor& tensor, const c10::VariableVersion& version) {
  if (!tensor.defined()) return tensor;
  return at::Tensor(
      tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
}
at::Tensor kept_alias(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return alias(tensor, tensor.unsafeGetTensorImpl()->version_counter());
}
at::Tensor new_alias(const at::Tensor& tensor) { return alias(tensor, c10::VariableVersion(/*version=*/0)); }

template <class F>
c10::IValue with_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors) tensor = f(tensor);
  return tensors;
}

std::vector<int64_t> versions_of(const std::vector<c10::IValue>& values) {
  std::vector<int64_t> versions;
  for (const c10::IValue& value : values) {
    with_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) versions.push_back(tensor._version());
      return tensor;
    });
  }
  return versions;
}

}  // namespace

void OperatorCall::run() const {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKeepingKey), &stack);
}

KeptResults::KeptResults(std::string region, std::shared_ptr<const OperatorList> operators)
    : region_(std::move(region)), operators_(std::move(operators)) {
  if (operators_) queues_.resize(operators_->operators.size());
}

std::optional<size_t> KeptResults::index_of(const c10::OperatorHandle& op) const {
  for (size_t i = 0; i < queues_.size(); ++i) {
    if (operators_->operators[i].handle == op) return i;
  }
  return std::nullopt;
}

void KeptResults::keep(size_t i, const OperatorCall& call, const std::function<void()>& run) {
  const KeptOperator& kept = operators_->operators[i];
  const c10::FunctionSchema& schema = call.op.schema();
  if (kept.log_sumexp) torch::jit::peek(call.stack, *kept.log_sumexp, schema.arguments().size()) = true;
  Result result;
  result.arguments = signature_of(call);
  std::optional<RandomState> before;
  if (kept.is_random) {
    result.device = device_of(call);
    before = get_random_state(result.device);
  }
  run();
  if (before) {
    RandomState after = get_random_state(result.device);
    if (!is_same(*before, after)) result.random = std::move(after);
  }
  for (const c10::IValue& value : torch::jit::last(call.stack, schema.returns().size())) {
    result.values.push_back(with_tensors(value, kept_alias));
  }
  result.versions = versions_of(result.values);
  result.call = calls_++;
  queues_[i].results.push_back(std::move(result));
  ++operators_->kept;
}

void KeptResults::copy_before_change(const at::Tensor& changed) {
  if (!changed.has_storage()) return;
  const auto is_changed = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() && tensor.storage().is_alias_of(changed.storage());
  };
  const auto copied = [&](const at::Tensor& tensor) { return is_changed(tensor) ? tensor.clone() : tensor; };
  for (size_t i = 0; i < queues_.size(); ++i) {
    for (Result& result : queues_[i].results) {
      check_unchanged(result, i);
      for (c10::IValue& value : result.values) value = with_tensors(value, copied);
      result.versions = versions_of(result.values);
    }
  }
}

void KeptResults::let_go_from(size_t call) {
  for (Queue& queue : queues_) {
    for (Result& result : queue.results) {
      if (result.call < call) continue;
      result.is_kept = false;
      result.values.clear();
      result.versions.clear();
    }
  }
}

void KeptResults::check_unchanged(const Result& result, size_t i) const {
  require(versions_of(result.values) == result.versions, region_, ": a result of ", operators_->names[i],
          ", which is kept for backward, was changed in place; change a copy, or leave this operator out of "
          "what is "
          "kept");
}

void KeptResults::end_first_run() const {
  for (size_t i = 0; i < queues_.size(); ++i) {
    for (const Result& result : queues_[i].results) check_unchanged(result, i);
  }
}

void KeptResults::begin_second_run(bool stays) {
  if (is_empty()) return;
  require(!is_spent_, region_,
          " cannot be recomputed once more, because an earlier backward pass freed the results that it kept; "
          "give that "
          "one retain_graph");
  for (Queue& queue : queues_) queue.next = 0;
  is_second_ = true;
  stays_ = stays;
}

bool KeptResults::hand_out(size_t i, const OperatorCall& call) {
  Queue& queue = queues_[i];
  const KeptOperator& kept = operators_->operators[i];
  const size_t count = call.op.schema().arguments().size();
  if (kept.log_sumexp) torch::jit::peek(call.stack, *kept.log_sumexp, count) = true;
  require(queue.next < queue.results.size() && queue.results[queue.next].arguments == signature_of(call),
          region_, " calls ", operators_->names[i],
          " more often when it is recomputed than in forward, or with other shapes or numbers, so that no "
          "kept result "
          "belongs to the call; leave this operator out of what is kept");
  Result& result = queue.results[queue.next++];
  if (!result.is_kept) return false;
  check_unchanged(result, i);
  torch::jit::drop(call.stack, count);
  for (const c10::IValue& value : result.values) call.stack.push_back(with_tensors(value, new_alias));
  if (result.random) set_random_state(result.device, *result.random);
  if (!stays_) {
    result.values.clear();
    result.versions.clear();
  }
  return true;
}

void KeptResults::end_second_run() const {
  for (size_t i = 0; i < queues_.size(); ++i) {
    const Queue& queue = queues_[i];
    const bool all = std::none_of(queue.results.begin() + static_cast<std::ptrdiff_t>(queue.next),
                                  queue.results.end(), [](const Result& result) { return result.is_kept; });
    require(all, region_, " calls ", operators_->names[i],
            " less often when it is recomputed than in forward; leave this operator out of what is kept");
  }
}

void KeptResults::end_pass() noexcept {
  if (is_second_ && !stays_) forget();
}

void KeptResults::forget() noexcept {
  for (Queue& queue : queues_) queue.results.clear();
  is_spent_ = true;
}

}  // namespace pacer::detail
