#include <pacer/optimizers/detail/onebit_bucket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

OneBitBucket::OneBitBucket(std::vector<OneBitTensor> tensors, const OneBitSetup& setup,
                           const std::shared_ptr<Communicator>& shard_ranks)
    : tensors_(std::move(tensors)),
      exchange_(setup.exchanges()
                    ? std::make_unique<OneBitExchange>(setup.route, counts_of(tensors_), setup.compression())
                    : nullptr),
      variance_floor_(setup.variance_floor()),
      device_(setup.route.world().device()),
      layout_(exchange_ ? exchange_->layout() : kernels::OneBitLayout(counts_of(tensors_), 1)),
      rows_(layout_.rows()),
      variance_(flat_zeros()),
      momentum_(flat_zeros()),
      units_(make_tiles(layout_.counts(), kReductionUnit)) {
  const auto count = static_cast<int64_t>(tensors_.size());
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device_);
  floors_ = at::zeros({count}, doubles.dtype(at::kFloat));
  total_ = at::zeros({1}, doubles);
  sums_ = at::empty({count}, doubles);
  partials_ = at::empty({static_cast<int64_t>(units_.size())}, doubles);
  arguments_.host().resize(tensors_.size());
  if (shard_ranks) shared_units_ = std::make_unique<SharedUnits>(shard_ranks, bounds_of(tensors_), device_);
  if (device_.is_cuda()) make_tables();
  if (setup.rule != kernels::UpdateRule::lamb) return;
  lamb_.emplace(tensors_, layout_, units_, device_, shard_ranks);
  if (exchange_) exchange_->keep_former_mean();
}

at::Tensor OneBitBucket::flat_zeros() const {
  return at::zeros({layout_.length()}, at::TensorOptions().dtype(at::kFloat).device(device_));
}

at::Tensor OneBitBucket::view(const at::Tensor& flat, size_t i) const {
  return tensors_[i].view(flat, layout_.offset(i));
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
  if (arguments_.host()[i] == tensor) return;
  arguments_.host()[i] = tensor;
  arguments_.mark_changed();
  if (device_.is_cpu()) return;
  gradients_.host()[i].gradient = tensor.gradient;
  gradients_.mark_changed();
}

void OneBitBucket::send() {
  arguments_.send(device_);
  gradients_.send(device_);
}

void OneBitBucket::prepare(const std::vector<GroupSettings>& settings) {
  send();
  if (lamb_) lamb_->configure(settings);
}

// Of whole tensors, here and on other ranks.
at::Tensor OneBitBucket::all_partials() const {
  return shared_units_ ? shared_units_->gather(partials_.view({1, -1})).view({-1}) : partials_;
}

void OneBitBucket::sum_of_squares(double* sum) {
  auto* partials = partials_.mutable_data_ptr<double>();
  if (device_.is_cpu()) {
    for_each_tile(units_, [&](int64_t u) {
      const Tile& unit = units_[static_cast<size_t>(u)];
      const kernels::OneBitAdamTensor& tensor = arguments_.host()[unit.tensor];
      partials[u] = unit_sum_of_squares(gradient_type(tensor.storage), tensor.gradient, unit);
    });
    const at::Tensor all = all_partials();
    *sum = sum_partials(all.const_data_ptr<double>(), all.numel());
    return;
  }
  const kernels::Stream stream = current_stream(device_);
  for (const OneBitTable& table : tables_) {
    kernels::sum_of_squares_cuda(
        gradient_type(table.storage), table.units.pointer(), static_cast<int64_t>(table.units.host().size()),
        gradients_.pointer(), tables_.size() == 1 ? nullptr : table.unit_places.pointer(), partials, stream);
  }
  const at::Tensor all = all_partials();
  kernels::sum_partials_cuda(all.const_data_ptr<double>(), all.numel(), sum, stream);
}

kernels::OneBitAdamRows OneBitBucket::rows(const kernels::StepScalars* scalars) const {
  kernels::OneBitAdamWork work{};
  work.tensors = arguments_.pointer();
  work.scalars = scalars;
  work.momentum_scales = lamb_ ? lamb_->momentum_scales().const_data_ptr<float>() : nullptr;
  work.floors = floors_.const_data_ptr<float>();
  work.variance = variance_.mutable_data_ptr<float>();
  work.dense_momentum = momentum_.defined() ? momentum_.const_data_ptr<float>() : nullptr;
  if (exchange_) work.bits = exchange_->mean();
  work.is_from_signs = exchange_ != nullptr;
  return {work, rows_.pieces.data(), rows_.first.data(), rows_.count(), rows_.extent};
}

kernels::OneBitControl OneBitBucket::control(const kernels::GradientCheck* check) const {
  if (device_.is_cuda() && exchange_) return exchange_->control(check);
  return {check, nullptr};
}

template <class F>
void OneBitBucket::for_units(const F& f) const {
  at::parallel_for(0, rows_.units(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) f(unit);
  });
}

// The exchange starts with the momentum beta1 * m + (1 - beta1) * g.
void OneBitBucket::start(const kernels::StepScalars* scalars, const kernels::GradientCheck* check,
                         const at::Tensor& factor) {
  if (factor.defined()) scalars = with_factor(scalars, factor);
  const kernels::OneBitAdamRows rows = this->rows(scalars);
  const kernels::OneBitStorage storage{tables_.size() == 1,
                                       tables_.empty() ? kernels::AdamStorage::f32 : tables_.front().storage};
  OneBitInput input;
  input.source = [&](int64_t row, int64_t width, float* values) {
    kernels::onebit_momentum_row(rows, row, width, values);
  };
  input.enqueue = [&](const auto& side, const auto& control, kernels::Stream stream) {
    onebit_compress_momentum_cuda(side, rows.work, storage, control, stream);
  };
  input.check = check;
  exchange_->start(input, attempt_);
}

// Scalars of so many step groups, from the first on, are read for the tensors.
int64_t OneBitBucket::step_groups() const {
  int64_t last = 0;
  for (const kernels::OneBitAdamTensor& tensor : arguments_.host()) last = std::max(last, tensor.scalars);
  return last + 1;
}

const kernels::StepScalars* OneBitBucket::with_factor(const kernels::StepScalars* scalars,
                                                      const at::Tensor& factor) {
  using kernels::StepScalars;
  const int64_t count = step_groups();
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
  const kernels::OneBitAdamRows rows = this->rows(scalars);
  if (!lamb_) {
    if (device_.is_cpu()) for_units([&](int64_t unit) { onebit_update_cpu(rows, unit); });
    for (const OneBitTable& table : tables_) {
      onebit_update_cuda(table.storage, table.tiles.view(), rows.work, dense, control,
                         current_stream(device_));
    }
    return;
  }
  OneBitLambKernels::Before before;
  before.dense = dense_before.defined() ? dense_before.const_data_ptr<float>() : nullptr;
  if (exchange_) {
    before.bits = exchange_->former_mean();
    before.status = exchange_->former_status();
  }
  lamb_->step(tables_, units_, rows.work, before, dense, control);
}

void OneBitBucket::take_gradients(const kernels::StepScalars* scalars, const kernels::GradientCheck* check,
                                  bool refresh) {
  const kernels::OneBitAdamRows rows = this->rows(scalars);
  dense_before_ = lamb_ && momentum_.defined() ? momentum_.clone() : at::Tensor();
  if (!momentum_.defined()) momentum_ = flat_zeros();
  auto* momentum = momentum_.mutable_data_ptr<float>();
  if (device_.is_cpu()) {
    for_units([&](int64_t unit) {
      onebit_dense_momentum_cpu(rows, unit, momentum);
      if (refresh) onebit_refresh_cpu(rows, unit);
    });
  }
  for (const OneBitTable& table : tables_) {
    onebit_dense_momentum_cuda(table.storage, table.tiles.view(), rows.work, momentum, refresh,
                               control(check), current_stream(device_));
  }
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
