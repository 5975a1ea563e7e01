#include <pacer/optimizers/detail/onebit_bucket.h>

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <pacer/kernels/cpu/target.h>

namespace pacer::detail {

OneBitBucket::OneBitBucket(std::vector<OneBitTensor> tensors, std::unique_ptr<OneBitExchange> exchange,
                           double variance_floor, kernels::UpdateRule rule, at::Device device,
                           const std::shared_ptr<Communicator>& shard_ranks)
    : tensors_(std::move(tensors)),
      exchange_(std::move(exchange)),
      variance_floor_(variance_floor),
      device_(device),
      layout_(exchange_ ? exchange_->layout() : kernels::OneBitLayout(counts_of(tensors_), 1)),
      kernels_(tensors_, layout_, device, shard_ranks),
      variance_(flat_zeros()),
      momentum_(flat_zeros()) {
  const auto options = at::TensorOptions().device(device_);
  floors_ = at::zeros({static_cast<int64_t>(tensors_.size())}, options.dtype(at::kFloat));
  total_ = at::zeros({1}, options.dtype(at::kDouble));
  if (rule != kernels::UpdateRule::lamb) return;
  lamb_.emplace(tensors_, layout_, kernels_.units(), device_, shard_ranks);
  if (exchange_) exchange_->keep_former_mean();
}

at::Tensor OneBitBucket::flat_zeros() const {
  return at::zeros({layout_.length()}, at::TensorOptions().dtype(at::kFloat).device(device_));
}

at::Tensor OneBitBucket::view(const at::Tensor& flat, size_t i) const {
  return tensors_[i].view(flat, layout_.offset(i));
}

void OneBitBucket::take_moments(const OneBitStates& states, const std::vector<GroupSettings>& settings) {
  const kernels::FullDenormals full_denormals;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const FusedAdamStateFields& state = *states[i];
    const int64_t steps = state.step();
    const at::Tensor corrected = state.exp_avg_sq().to(at::kDouble);
    if (steps > 0) corrected.div_(bias_corrections(settings[tensors_[i].group].kernel, steps).c2);
    view(variance_, i).copy_(corrected);
    view(momentum_, i).copy_(state.exp_avg());
  }
}

void OneBitBucket::take_over(const OneBitStates& states, const std::vector<GroupSettings>& settings) {
  const kernels::FullDenormals full_denormals;
  if (lamb_) lamb_->freeze(states, settings, variance_, momentum_, floors_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    states[i]->exp_avg_sq(view(variance_, i));
    states[i]->exp_avg(at::Tensor());
  }
}

void OneBitBucket::set_floors(const kernels::GradientCheck* check) {
  kernels_.floors(variance_, variance_floor_, floors_, total_, control(check));
}

void OneBitBucket::raise_floors(const at::Tensor& mean_variance) {
  const at::Tensor of_mean = mean_variance.mul(variance_floor_).neg().to(at::kFloat);
  floors_.copy_(at::where(kernels_.sums_of_variance().gt(0), floors_, of_mean));
}

// ---- A step. ----

void OneBitBucket::begin(int64_t attempt, int64_t refresh_every) {
  if (exchange_) exchange_->check();
  if (device_.is_cuda() && exchange_ && exchange_->is_known_to_have_mean()) momentum_ = at::Tensor();
  attempt_ = attempt;
  refresh_every_ = refresh_every;
}

void OneBitBucket::set_tensor(size_t i, const ParameterEntry& entry, const void* gradient,
                              const GroupSettings& settings) {
  const FusedAdamStateFields& state = *entry.state;
  kernels::OneBitAdamTensor tensor;
  tensor.parameter = pointer_of(entry.memory);
  tensor.master_or_remainder = pointer_of(state.master().defined() ? state.master() : state.remainder());
  tensor.gradient = gradient;
  tensor.begin = layout_.offset(i);
  tensor.scalars = entry.step_group;
  tensor.storage = entry.storage;
  tensor.largest = kernels::largest_direction(settings.kernel.beta1, settings.kernel.beta2);
  if (refresh_every_ > 0) {
    tensor.refresh = kernels::variance_refresh(settings.kernel.beta2, refresh_every_);
  }
  kernels_.set_tensor(i, tensor);
}

void OneBitBucket::prepare(const std::vector<GroupSettings>& settings) {
  send();
  if (lamb_) lamb_->configure(settings);
}

kernels::OneBitAdamWork OneBitBucket::work(const kernels::StepScalars* scalars) const {
  kernels::OneBitAdamWork work{};
  work.tensors = kernels_.tensors();
  work.scalars = scalars;
  work.momentum_scales = lamb_ ? lamb_->momentum_scales().const_data_ptr<float>() : nullptr;
  work.floors = floors_.const_data_ptr<float>();
  work.variance = variance_.mutable_data_ptr<float>();
  work.dense_momentum = momentum_.defined() ? momentum_.const_data_ptr<float>() : nullptr;
  if (exchange_) work.bits = exchange_->mean();
  work.is_from_signs = exchange_ != nullptr;
  return work;
}

kernels::OneBitControl OneBitBucket::control(const kernels::GradientCheck* check) const {
  if (device_.is_cuda() && exchange_) return exchange_->control(check);
  return {check, nullptr};
}

void OneBitBucket::start(const kernels::StepScalars* scalars, const kernels::GradientCheck* check,
                         const at::Tensor& factor) {
  if (factor.defined()) scalars = with_factor(scalars, factor);
  kernels_.start(*exchange_, work(scalars), check, attempt_);
}

const kernels::StepScalars* OneBitBucket::with_factor(const kernels::StepScalars* scalars,
                                                      const at::Tensor& factor) {
  using kernels::StepScalars;
  const int64_t count = kernels_.step_groups();
  own_scalars_ = at::empty({count, static_cast<int64_t>(sizeof(StepScalars))},
                           at::TensorOptions().dtype(at::kByte).device(device_));
  auto* replaced = static_cast<StepScalars*>(own_scalars_.mutable_data_ptr());
  const auto* wanted = factor.const_data_ptr<double>();
  if (device_.is_cuda()) {
    kernels::replace_factor_cuda(scalars, count, wanted, replaced, current_stream(device_));
  } else {
    kernels::replace_factor_cpu(scalars, count, *wanted, replaced);
  }
  return replaced;
}

void OneBitBucket::finish(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  exchange_->finish();
  const at::Tensor dense_before = momentum_;
  if (device_.is_cpu()) momentum_ = at::Tensor();
  update(scalars, dense_before, /*dense=*/false, control(check));
}

// `dense_before`: the momentum before this step, where it may be dense.
void OneBitBucket::update(const kernels::StepScalars* scalars, const at::Tensor& dense_before, bool dense,
                          const kernels::OneBitControl& control) {
  if (!lamb_) return kernels_.update(work(scalars), dense, control);
  OneBitLambKernels::Before before;
  before.dense = dense_before.defined() ? dense_before.const_data_ptr<float>() : nullptr;
  if (exchange_) {
    before.bits = exchange_->former_mean();
    before.status = exchange_->former_status();
  }
  lamb_->step(kernels_, work(scalars), before, dense, control);
}

void OneBitBucket::take_gradients(const kernels::StepScalars* scalars, const kernels::GradientCheck* check,
                                  bool refresh) {
  const kernels::OneBitAdamWork before = work(scalars);
  dense_before_ = lamb_ && momentum_.defined() ? momentum_.clone() : at::Tensor();
  if (!momentum_.defined()) momentum_ = flat_zeros();
  kernels_.dense_momentum(before, momentum_.mutable_data_ptr<float>(), refresh, control(check));
  if (device_.is_cuda() && exchange_) exchange_->forget_mean(check);
  if (momentum_error_.defined()) add_momentum_error(check);
}

void OneBitBucket::update_dense(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  update(scalars, std::exchange(dense_before_, at::Tensor()), /*dense=*/true, control(check));
}

// Once after a resume with other ranks; waits for a GPU.
void OneBitBucket::add_momentum_error(const kernels::GradientCheck* check) {
  if (device_.is_cuda()) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(check);
    kernels::GradientCheck on_host;
    const at::Tensor copy = at::from_blob(const_cast<uint8_t*>(bytes), {sizeof on_host},
                                          at::TensorOptions().dtype(at::kByte).device(device_))
                                .cpu();
    std::memcpy(&on_host, copy.const_data_ptr(), sizeof on_host);
    if (on_host.non_finite != 0) return;
  }
  if (lamb_) lamb_->unscale(momentum_error_);
  momentum_.add_(std::exchange(momentum_error_, at::Tensor()));
}

}  // namespace pacer::detail
