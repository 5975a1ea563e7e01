#include <pacer/optimizers/detail/onebit_engine.h>

#include <cstring>
#include <utility>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/collectives/detail/cuda_stream.h>
#include <pacer/core/error.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {
namespace {

std::vector<int64_t> counts_of(const std::vector<AdamEntry>& entries) {
  std::vector<int64_t> counts;
  for (const AdamEntry& entry : entries) counts.push_back(entry.parameter.numel());
  return counts;
}

}  // namespace

OneBitEngine::OneBitEngine(std::vector<AdamEntry> entries, std::unique_ptr<OneBitExchange> exchange,
                           double variance_floor, kernels::UpdateRule rule, at::Device device)
    : entries_(std::move(entries)),
      exchange_(std::move(exchange)),
      variance_floor_(variance_floor),
      device_(device),
      layout_(exchange_ ? exchange_->layout() : kernels::OneBitLayout(counts_of(entries_), 1)),
      stages_(entries_, layout_, device),
      variance_(flat_zeros()),
      momentum_(flat_zeros()) {
  const auto options = at::TensorOptions().device(device_);
  floors_ = at::zeros({static_cast<int64_t>(entries_.size())}, options.dtype(at::kFloat));
  total_ = at::zeros({1}, options.dtype(at::kDouble));
  weighed_ = at::zeros({static_cast<int64_t>(sizeof(kernels::GradientCheck))}, options.dtype(at::kByte));
  if (rule != kernels::UpdateRule::lamb) return;
  lamb_.emplace(entries_, layout_, stages_.units(), device_);
  if (exchange_) exchange_->keep_former_mean();
}

at::Tensor OneBitEngine::flat_zeros() const {
  return at::zeros({layout_.length()}, at::TensorOptions().dtype(at::kFloat).device(device_));
}

// Of the entry's elements, in its parameter's shape and memory order.
at::Tensor OneBitEngine::view(const at::Tensor& flat, size_t i) const {
  const at::Tensor& parameter = entries_[i].parameter;
  return flat.as_strided(parameter.sizes(), parameter.strides(), layout_.offset(i));
}

bool OneBitEngine::freeze(const std::vector<AdamGroupSettings>& settings) {
  const c10::DeviceGuard guard(device_);
  const kernels::FullDenormals full_denormals;
  settings_ = settings;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const AdamEntry& entry = entries_[i];
    const double c2 = bias_corrections(settings_[entry.group].kernel, entry.state->step()).c2;
    const at::Tensor corrected = entry.state->exp_avg_sq().to(at::kDouble);
    if (entry.state->step() > 0) corrected.div_(c2);
    view(variance_, i).copy_(corrected);
    view(momentum_, i).copy_(entry.state->exp_avg());
  }
  set_floors(control(nullptr));
  if (layout_.length() > 0 && !(total_.item<double>() > 0)) return false;
  if (lamb_) lamb_->freeze(entries_, settings_, variance_, momentum_, floors_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].state->exp_avg_sq(view(variance_, i));
    entries_[i].state->exp_avg(at::Tensor());
  }
  return true;
}

void OneBitEngine::set_floors(const kernels::OneBitControl& control) {
  stages_.floors(variance_, variance_floor_, floors_, total_, control);
}

// The entry as the kernels see it; a gradient in another memory order than the parameter is copied.
kernels::OneBitAdamTensor OneBitEngine::describe(AdamEntry& entry) {
  kernels::OneBitAdamTensor tensor;
  std::memset(&tensor, 0, sizeof tensor);  // padding, too: it is compared as bytes
  tensor.parameter = pointer_of(entry.parameter);
  tensor.extra =
      pointer_of(entry.state->master().defined() ? entry.state->master() : entry.state->remainder());
  tensor.storage = entry.storage;
  tensor.scalars = entry.slot;
  const at::Tensor& gradient = entry.parameter.grad();
  if (!gradient.defined()) return tensor;
  if (!needs_dense_gradient(entry, gradient)) {
    tensor.gradient = gradient.const_data_ptr();
    return tensor;
  }
  if (!entry.dense_gradient.defined()) {
    entry.dense_gradient =
        at::empty_strided(entry.parameter.sizes(), entry.parameter.strides(), gradient.options());
  }
  entry.dense_gradient.copy_(gradient);
  tensor.gradient = entry.dense_gradient.const_data_ptr();
  return tensor;
}

void OneBitEngine::prepare(const std::vector<AdamGroupSettings>& settings, int64_t refresh_every) {
  if (exchange_) exchange_->check();
  for (const AdamEntry& entry : entries_) {
    const at::Tensor& parameter = entry.parameter;
    const auto storage = storage_for(parameter.scalar_type(), settings[entry.group].master_weights,
                                     Rounding::nearest, entry.name);
    require(storage == entry.storage && same_layout(parameter, entry.state->exp_avg_sq()), "parameter ",
            entry.name, " changed its dtype, shape or memory order after the freeze; load a checkpoint");
    if (parameter.grad().defined()) check_gradient(parameter, parameter.grad(), entry.name);
  }
  settings_ = settings;
  const c10::DeviceGuard guard(device_);
  const std::vector<char> all(entries_.size(), 1);
  if (!slots_.fit(entries_, all)) slots_.assign(entries_, all, device_);
  slots_.configure(settings_, entries_, all);
  slots_.send(device_);
  if (device_.is_cuda()) slots_.let_device_lead();
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    if (entry.was_written()) follow_parameter(entry);
    kernels::OneBitAdamTensor tensor = describe(entry);
    tensor.begin = layout_.offset(i);
    if (refresh_every > 0) {
      tensor.refresh = kernels::variance_refresh(settings_[entry.group].kernel.beta2, refresh_every);
    }
    stages_.set_tensor(i, tensor);
  }
  stages_.send();
  if (lamb_) lamb_->configure(entries_, settings_);
  if (device_.is_cuda() && exchange_ && exchange_->is_known_to_have_mean()) momentum_ = at::Tensor();
}

kernels::OneBitAdamWork OneBitEngine::work(const void* scalars) const {
  kernels::OneBitAdamWork work{};
  work.tensors = stages_.tensors();
  work.scalars = scalars;
  work.momentum_scales = lamb_ ? lamb_->momentum_scales().const_data_ptr<float>() : nullptr;
  work.floors = floors_.const_data_ptr<float>();
  work.variance = variance_.mutable_data_ptr<float>();
  work.dense_momentum = momentum_.defined() ? momentum_.const_data_ptr<float>() : nullptr;
  if (exchange_) work.bits = exchange_->mean();
  return work;
}

kernels::OneBitControl OneBitEngine::control(const kernels::GradientCheck* check) const {
  if (device_.is_cuda() && exchange_) return exchange_->control(check);
  return {check, nullptr};
}

const kernels::GradientCheck* OneBitEngine::weigh(const kernels::GradientCheck* check, double weight) {
  auto* weighed = static_cast<kernels::GradientCheck*>(weighed_.mutable_data_ptr());
  if (device_.is_cuda()) {
    kernels::weighed_check_cuda(check, weight, weighed, current_stream(device_));
  } else {
    *weighed = kernels::weighed_check(*check, weight);
  }
  return weighed;
}

void OneBitEngine::exchange_step(const kernels::GradientCheck* check, double weight, int64_t step) {
  const c10::DeviceGuard guard(device_);
  const kernels::GradientCheck* weighed = weigh(check, weight);
  const void* scalars = slots_.write_scalars(device_, weighed);
  const at::Tensor dense_before = momentum_;
  stages_.exchange(*exchange_, work(scalars), weighed, step);
  if (device_.is_cpu()) momentum_ = at::Tensor();
  update(scalars, dense_before, /*dense=*/false, control(weighed));
  conclude();
}

// `dense_before`: the momentum before this step, where it may be dense.
void OneBitEngine::update(const void* scalars, const at::Tensor& dense_before, bool dense,
                          const kernels::OneBitControl& control) {
  if (!lamb_) return stages_.update(work(scalars), dense, control);
  OneBitLambStages::Before before;
  before.dense = dense_before.defined() ? dense_before.const_data_ptr<float>() : nullptr;
  if (exchange_) {
    before.bits = exchange_->former_mean();
    before.status = exchange_->former_status();
  }
  lamb_->step(stages_, work(scalars), before, dense, control);
}

void OneBitEngine::dense_step(const kernels::GradientCheck* check, bool refresh) {
  const c10::DeviceGuard guard(device_);
  const void* scalars = slots_.write_scalars(device_, check);
  const kernels::OneBitAdamWork before = work(scalars);
  const at::Tensor dense_before = lamb_ && momentum_.defined() ? momentum_.clone() : at::Tensor();
  if (!momentum_.defined()) momentum_ = flat_zeros();
  stages_.dense_momentum(before, momentum_.mutable_data_ptr<float>(), refresh, control(check));
  if (device_.is_cuda() && exchange_) exchange_->forget_mean(check);
  if (momentum_error_.defined()) add_momentum_error(check);
  if (refresh) set_floors(control(check));
  update(scalars, dense_before, /*dense=*/true, control(check));
  conclude();
}

// Once after a resume with other ranks; waits for a GPU.
void OneBitEngine::add_momentum_error(const kernels::GradientCheck* check) {
  if (device_.is_cuda()) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(check);
    kernels::GradientCheck on_host;
    const at::Tensor copy =
        at::from_blob(const_cast<uint8_t*>(bytes), {sizeof on_host}, weighed_.options()).cpu();
    std::memcpy(&on_host, copy.const_data_ptr(), sizeof on_host);
    if (on_host.non_finite != 0) return;
  }
  if (lamb_) lamb_->unscale(entries_, momentum_error_);
  momentum_.add_(std::exchange(momentum_error_, at::Tensor()));
}

void OneBitEngine::conclude() {
  slots_.count_step();
  for (AdamEntry& entry : entries_) {
    entry.parameter.unsafeGetTensorImpl()->bump_version();
    entry.remember_version();
  }
}

}  // namespace pacer::detail
