#include <pacer/optimizers/detail/onebit_part.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

OneBitPart::OneBitPart(std::vector<OneBitTensor> tensors, std::unique_ptr<OneBitExchange> exchange,
                       double variance_floor, kernels::UpdateRule rule, at::Device device,
                       const std::shared_ptr<Communicator>& sharers)
    : tensors_(std::move(tensors)),
      exchange_(std::move(exchange)),
      sharers_(sharers),
      variance_floor_(variance_floor),
      device_(device),
      layout_(exchange_ ? exchange_->layout() : kernels::OneBitLayout(counts_of(tensors_), 1)),
      stages_(tensors_, layout_, device, sharers),
      variance_(flat_zeros()),
      momentum_(flat_zeros()) {
  const auto options = at::TensorOptions().device(device_);
  floors_ = at::zeros({static_cast<int64_t>(tensors_.size())}, options.dtype(at::kFloat));
  total_ = at::zeros({1}, options.dtype(at::kDouble));
  sums_ = at::zeros({3}, options.dtype(at::kDouble));
  if (rule != kernels::UpdateRule::lamb) return;
  lamb_.emplace(tensors_, layout_, stages_.units(), device_, sharers);
  if (exchange_) exchange_->keep_former_mean();
}

at::Tensor OneBitPart::flat_zeros() const {
  return at::zeros({layout_.length()}, at::TensorOptions().dtype(at::kFloat).device(device_));
}

at::Tensor OneBitPart::view(const at::Tensor& flat, size_t i) const {
  return tensors_[i].view(flat, layout_.offset(i));
}

bool OneBitPart::freeze(const OneBitStates& states, const std::vector<AdamGroupSettings>& settings) {
  const c10::DeviceGuard guard(device_);
  const kernels::FullDenormals full_denormals;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const FusedAdamStateFields& state = *states[i];
    const int64_t steps = state.step();
    const at::Tensor corrected = state.exp_avg_sq().to(at::kDouble);
    if (steps > 0) corrected.div_(bias_corrections(settings[tensors_[i].group].kernel, steps).c2);
    view(variance_, i).copy_(corrected);
    view(momentum_, i).copy_(state.exp_avg());
  }
  set_floors(control(nullptr));
  if (stages_.elements() > 0 && !(total_.item<double>() > 0)) return false;
  give_unstepped_counts(tensors_, states);
  if (lamb_) lamb_->freeze(states, settings, variance_, momentum_, floors_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    states[i]->exp_avg_sq(view(variance_, i));
    states[i]->exp_avg(at::Tensor());
  }
  return true;
}

void OneBitPart::set_floors(const kernels::OneBitControl& control) {
  stages_.floors(variance_, variance_floor_, floors_, total_, control);
}

// ---- A step. ----

void OneBitPart::begin(const Step& step) {
  if (exchange_) exchange_->check();
  step_ = step;
}

void OneBitPart::check_fits(const std::vector<const AdamEntry*>& entries) const {
  constexpr const char* kAdvice =
      " after the variance froze, and what ranks have agreed on would no longer fit; ";
  for (size_t i = 0; i < std::min(entries.size(), tensors_.size()); ++i) {
    const AdamEntry& entry = *entries[i];
    const OneBitTensor& tensor = tensors_[i];
    const at::Tensor& parameter = entry.parameter;
    const InMessage called{entry.name, parameter.sizes()};
    require(entry.name == tensor.name, "parameter ", called, " took the place of ", InMessage{tensor.name},
            kAdvice, "leave the list of parameters as it was");
    require(entry.storage == tensor.storage, "parameter ", called, " changed its dtype (it is ",
            parameter.scalar_type(), " now) or its master weights", kAdvice,
            "change it back, or load a checkpoint");
    const bool fits = entry.is_part ? entry.range.count == tensor.count
                                    : parameter.sizes() == at::IntArrayRef(tensor.sizes) &&
                                          same_strides(parameter.strides(), tensor.strides, tensor.sizes);
    require(fits, "parameter ", called, " changed its shape or memory order (sizes ", parameter.sizes(),
            ", strides ", parameter.strides(), " now)", kAdvice, "change it back, or load a checkpoint");
    const at::Tensor variance = view(variance_, i);
    require(entry.state != nullptr && !entry.state->exp_avg().defined() &&
                entry.state->exp_avg_sq().defined() &&
                entry.state->exp_avg_sq().const_data_ptr() == variance.const_data_ptr() &&
                same_layout(entry.state->exp_avg_sq(), variance),
            "the state of parameter ", called, " was replaced or removed", kAdvice,
            "write into its tensors, or load a checkpoint");
  }
  const size_t count = tensors_.size();
  const std::string added = entries.size() > count ? entries[count]->name : "";
  const std::string removed = entries.size() < count ? tensors_[entries.size()].name : "";
  require(entries.size() <= count, "parameter ", InMessage{added}, " was added", kAdvice,
          "add it before, or to a group with compress(false)");
  require(entries.size() >= count, "parameter ", InMessage{removed}, " was removed", kAdvice,
          "to stop training it, say requires_grad_(false)");
}

void OneBitPart::set_tensor(const AdamEntry& entry, const void* gradient, const AdamGroupSettings& settings) {
  const FusedAdamStateFields& state = *entry.state;
  kernels::OneBitAdamTensor tensor;
  tensor.parameter = pointer_of(entry.memory);
  tensor.extra = pointer_of(state.master().defined() ? state.master() : state.remainder());
  tensor.gradient = gradient;
  tensor.begin = layout_.offset(entry.position);
  tensor.scalars = entry.slot;
  tensor.storage = entry.storage;
  if (step_.refresh_every > 0) {
    tensor.refresh = kernels::variance_refresh(settings.kernel.beta2, step_.refresh_every);
  }
  stages_.set_tensor(entry.position, tensor);
}

void OneBitPart::prepare(const std::vector<AdamGroupSettings>& settings) {
  stages_.send();
  if (lamb_) lamb_->configure(settings);
  if (device_.is_cuda() && exchange_ && exchange_->is_known_to_have_mean()) momentum_ = at::Tensor();
}

// One number of each worker, on this rank's device.
at::Tensor OneBitPart::sums_of_workers(const at::Tensor& own) const {
  const int64_t workers = exchange_->route().workers();
  if (workers == 1) return own;
  Communicator& peers = exchange_->route().peers();
  const at::Tensor all = at::empty({peers.world_size()}, own.options());
  const auto agreed = CollectiveOptions().agreed(true);
  (own.is_cuda() ? peers.all_gather(all, own, agreed) : peers.all_gather_host(all, own)).wait();
  return all.view({workers, -1}).select(1, 0).contiguous();  // the ranks of a worker have the same
}

void OneBitPart::look(GradientGuard& guard, const double* averaged, int64_t count) {
  sums_.zero_();
  auto* own = sums_.mutable_data_ptr<double>();
  double *of_others = own + 1, *total = own + 2;
  stages_.sum_of_squares(own);
  const bool is_local = step_.kind == OneBitKind::compressed;
  const int64_t workers = is_local ? exchange_->route().workers() : 1;
  const at::Tensor all = is_local ? sums_of_workers(sums_.narrow(0, 0, 1)) : sums_;
  const double weight = local_weight() / static_cast<double>(workers);
  const auto* of_workers = all.const_data_ptr<double>();
  if (device_.is_cuda()) {
    const kernels::Stream stream = current_stream(device_);
    if (count > 0) kernels::sum_partials_cuda(averaged, count, of_others, stream);
    kernels::joint_sum_of_squares_cuda(of_workers, workers, weight, of_others, total, stream);
  } else {
    if (count > 0) *of_others = sum_partials(averaged, count);
    *total = kernels::joint_sum_of_squares(of_workers, workers, weight, *of_others);
  }
  guard.look(total, 1);
}

kernels::OneBitAdamWork OneBitPart::work(const kernels::StepScalars* scalars) const {
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

kernels::OneBitControl OneBitPart::control(const kernels::GradientCheck* check) const {
  if (device_.is_cuda() && exchange_) return exchange_->control(check);
  return {check, nullptr};
}

void OneBitPart::step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  step_.kind == OneBitKind::compressed ? exchange_step(scalars, check) : dense_step(scalars, check);
}

void OneBitPart::exchange_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  const at::Tensor dense_before = momentum_;
  stages_.exchange(*exchange_, work(scalars), check, step_.attempt);
  if (device_.is_cpu()) momentum_ = at::Tensor();
  update(scalars, dense_before, /*dense=*/false, control(check));
}

// `dense_before`: the momentum before this step, where it may be dense.
void OneBitPart::update(const kernels::StepScalars* scalars, const at::Tensor& dense_before, bool dense,
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

void OneBitPart::dense_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check) {
  const bool refresh = step_.kind == OneBitKind::refresh;
  const kernels::OneBitAdamWork before = work(scalars);
  const at::Tensor dense_before = lamb_ && momentum_.defined() ? momentum_.clone() : at::Tensor();
  if (!momentum_.defined()) momentum_ = flat_zeros();
  stages_.dense_momentum(before, momentum_.mutable_data_ptr<float>(), refresh, control(check));
  if (device_.is_cuda() && exchange_) exchange_->forget_mean(check);
  if (momentum_error_.defined()) add_momentum_error(check);
  if (refresh) set_floors(control(check));
  update(scalars, dense_before, /*dense=*/true, control(check));
}

// Once after a resume with other ranks; waits for a GPU.
void OneBitPart::add_momentum_error(const kernels::GradientCheck* check) {
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
