// What a OneBitPart is rebuilt from, what it saves, and what it says of itself.
#include <pacer/optimizers/detail/onebit_part.h>

#include <cmath>
#include <set>

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

void OneBitPart::go_on(const OneBitStates& states, const NamedTensors& errors, const NamedTensors& of_rule) {
  const c10::DeviceGuard guard(device_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    FusedAdamStateFields& state = *states[i];
    view(variance_, i).copy_(state.exp_avg_sq());
    view(momentum_, i).copy_(state.exp_avg());
    state.exp_avg_sq(view(variance_, i));
    state.exp_avg(at::Tensor());
  }
  set_floors(control(nullptr));
  if (lamb_) lamb_->import_state(tensors_, states, of_rule);
  if (errors.empty()) return;
  if (!exchange_) {
    momentum_error_ = flat_zeros();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      view(momentum_error_, i).copy_(errors.at(tensors_[i].name + "/momentum_error"));
    }
    return;
  }
  const at::Tensor worker = flat_zeros();
  const at::Tensor server = at::zeros({exchange_->served_rows().extent}, worker.options());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    view(worker, i).copy_(errors.at(tensors_[i].name + "/worker_error"));
    const auto part = served_part(i);
    if (part.begin == part.end) continue;
    server.narrow(0, served_offset(i, part), part.end - part.begin)
        .copy_(errors.at(tensors_[i].name + "/server_error"));
  }
  exchange_->set_errors(worker, server);
}

kernels::OneBitLayout::Part OneBitPart::served_part(size_t i) const {
  return layout_.served_part(i, exchange_->route().worker());
}

int64_t OneBitPart::served_offset(size_t i, const kernels::OneBitLayout::Part& part) const {
  return layout_.offset(i) + part.begin - exchange_->route().worker() * layout_.chunk();
}

void OneBitPart::check_errors(const NamedTensors& errors, int64_t version) const {
  std::set<std::string> expected;
  const auto check = [&](const std::string& key, at::IntArrayRef sizes) {
    require(errors.count(key) != 0, "the state to load has no \"", key,
            "\"; resume with the state that this rank has saved");
    const at::Tensor& error = errors.at(key);
    require(error.scalar_type() == at::kFloat && error.sizes() == sizes, "\"", key,
            "\" of the state to load is ", error.scalar_type(), " of shape ", error.sizes(),
            ", but it must be Float of shape ", sizes, "; resume with as many ranks and the same parameters");
    expected.insert(key);
  };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const OneBitTensor& tensor = tensors_[i];
    if (!exchange_) {
      if (!errors.empty()) check(tensor.name + "/momentum_error", tensor.sizes);
      continue;
    }
    check(tensor.name + "/worker_error", tensor.sizes);
    const auto part = served_part(i);
    if (part.begin != part.end) check(tensor.name + "/server_error", {part.end - part.begin});
    const std::string order = tensor.name + kStrides;
    expected.insert(order);
    require(same_strides(saved_strides(errors, tensor.name, tensor.sizes, tensor.strides, version),
                         tensor.strides, tensor.sizes),
            "the state to load has the errors of parameter ", InMessage{tensor.name, tensor.sizes},
            " in another memory order than the parameter has here; give it the order that it had");
  }
  for (const auto& item : errors) {
    require(expected.count(item.first) != 0, "the state to load has \"", item.first,
            "\", which this rank does not need; resume with as many ranks, the same parameters and options");
  }
}

void OneBitPart::check_rule_state(const NamedTensors& of_rule) const {
  if (lamb_) return lamb_->check_state(tensors_, of_rule);
  require(of_rule.empty(), "the state to load has \"", of_rule.empty() ? "" : of_rule.begin()->first,
          "\", which only OneBitLamb has; load it into one");
}

double OneBitPart::compression_error() const {
  if (!exchange_) return 0;
  const at::Tensor lost = exchange_->worker_errors().to(at::kDouble);
  const at::Tensor sent = exchange_->worker_carried().to(at::kDouble);
  const double norm = sent.square().sum().item<double>();
  return norm == 0 ? 0 : std::sqrt(lost.square().sum().item<double>() / norm);
}

at::Tensor OneBitPart::momentum() const {
  const c10::DeviceGuard guard(device_);
  const bool dense = momentum_.defined() && !(device_.is_cuda() && exchange_ && exchange_->has_mean());
  if (dense) return momentum_;
  const at::Tensor decoded = stages_.decode(work(nullptr), control(nullptr));
  if (lamb_ && device_.is_cuda()) lamb_->unscale(tensors_, decoded);
  return decoded;
}

void OneBitPart::export_shared(NamedTensors& state) const {
  const at::Tensor all = momentum();
  for (size_t i = 0; i < tensors_.size(); ++i) state[tensors_[i].name + "/exp_avg"] = view(all, i);
  if (lamb_) lamb_->export_state(tensors_, state);
}

std::optional<size_t> OneBitPart::find(const std::string& name) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name == name) return i;
  }
  return std::nullopt;
}

double OneBitPart::lamb_factor(const std::string& name) const {
  const auto i = find(name);
  return i && lamb_ ? lamb_->factor(*i) : 1;
}

double OneBitPart::momentum_scale(const std::string& name) const {
  const auto i = find(name);
  return i && lamb_ ? lamb_->momentum_scale(*i) : 1;
}

void OneBitPart::rename(const std::vector<std::string>& names) {
  for (size_t i = 0; i < tensors_.size() && i < names.size(); ++i) tensors_[i].name = names[i];
}

void OneBitPart::export_errors(NamedTensors& state) const {
  if (!exchange_) {
    for (size_t i = 0; momentum_error_.defined() && i < tensors_.size(); ++i) {
      state[tensors_[i].name + "/momentum_error"] = view(momentum_error_, i);
    }
    return;
  }
  exchange_->check(/*wait=*/true);
  const at::Tensor worker = exchange_->worker_errors(), server = exchange_->server_errors();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    state[tensors_[i].name + "/worker_error"] = view(worker, i);
    add_strides(tensors_[i].name, tensors_[i].sizes, tensors_[i].strides, state);
    const auto part = served_part(i);
    if (part.begin == part.end) continue;
    state[tensors_[i].name + "/server_error"] =
        server.narrow(0, served_offset(i, part), part.end - part.begin);
  }
}

std::string OneBitPart::describe_floors() const {
  std::vector<at::Tensor> below;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    below.push_back(view(variance_, i).lt(floors_.select(0, static_cast<int64_t>(i))).sum());
  }
  if (below.empty()) return "";
  const at::Tensor counts = at::stack(below).cpu();
  int64_t all = 0, floored = 0;
  double worst = 0;
  size_t which = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const int64_t count = tensors_[i].count;
    if (count == 0) continue;
    const int64_t of_entry = counts.const_data_ptr<int64_t>()[i];
    all += count;
    floored += of_entry;
    const double share = static_cast<double>(of_entry) / static_cast<double>(count);
    if (share > worst) {
      worst = share;
      which = i;
    }
  }
  const auto percent = [](double share) { return static_cast<int64_t>(share * 100 + 0.5); };
  if (percent(worst) == 0) return "";
  return concatenate(percent(static_cast<double>(floored) / static_cast<double>(all)),
                     " % of the elements have less variance than their tensor's floor (most in ",
                     InMessage{tensors_[which].name, tensors_[which].sizes}, ": ", percent(worst), " %)");
}

}  // namespace pacer::detail
