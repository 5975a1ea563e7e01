// How a OneBitBucket begins at the freeze or from a saved state, what it saves, and what it says of itself.
#include <pacer/optimizers/detail/onebit_bucket.h>

#include <algorithm>

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

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

void OneBitBucket::go_on(const OneBitStates& states, NamedTensors& errors, int64_t errors_version,
                         NamedTensors& of_rule) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    FusedAdamStateFields& state = *states[i];
    view(variance_, i).copy_(state.exp_avg_sq());
    view(momentum_, i).copy_(state.exp_avg());
    state.exp_avg_sq(view(variance_, i));
    state.exp_avg(at::Tensor());
  }
  load_errors(errors, errors_version);
  if (lamb_) lamb_->import_state(states, of_rule);
}

NamedViews OneBitBucket::error_views(const at::Tensor& worker, const at::Tensor& server) const {
  NamedViews views;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string& name = tensors_[i].name;
    views.emplace_back(name + (exchange_ ? "/worker_error" : "/momentum_error"), view(worker, i));
    if (!exchange_) continue;
    const int64_t own = exchange_->route().worker();
    const auto part = layout_.served_part(i, own);
    if (part.begin == part.end) continue;
    const int64_t offset = layout_.offset(i) + part.begin - own * layout_.chunk();
    views.emplace_back(name + "/server_error", server.narrow(0, offset, part.end - part.begin));
  }
  return views;
}

void OneBitBucket::export_errors(NamedTensors& state) const {
  if (!exchange_) {
    if (momentum_error_.defined()) save_views(error_views(momentum_error_, {}), state);
    return;
  }
  exchange_->check(/*wait=*/true);
  save_views(error_views(exchange_->worker_errors(), exchange_->server_errors()), state);
  for (const OneBitTensor& tensor : tensors_) add_strides(tensor.name, tensor.sizes, tensor.strides, state);
}

void OneBitBucket::load_errors(NamedTensors& errors, int64_t version) {
  if (exchange_ ? tensors_.empty() : errors.empty()) return;
  const at::Tensor worker = flat_zeros();
  const at::Tensor server =
      exchange_ ? at::zeros({exchange_->served_rows().extent}, worker.options()) : at::Tensor();
  load_views(error_views(worker, server), errors,
             {"the state to load has no \"", "\"; resume with the state that this rank has saved",
              "; resume with as many ranks and the same parameters"});
  if (!exchange_) {
    momentum_error_ = worker;
    return;
  }
  for (const OneBitTensor& tensor : tensors_) require_same_order(errors, tensor, version);
  exchange_->set_errors(worker, server);
}

std::pair<double, double> OneBitBucket::lost_and_sent() const {
  const at::Tensor lost = exchange_->worker_errors().to(at::kDouble);
  const at::Tensor sent = exchange_->worker_carried().to(at::kDouble);
  return {lost.square().sum().item<double>(), sent.square().sum().item<double>()};
}

// In fp32, with zeros between tensors.
at::Tensor OneBitBucket::momentum() const {
  const c10::DeviceGuard guard(device_);
  const bool dense = momentum_.defined() && !(device_.is_cuda() && exchange_ && exchange_->has_mean());
  if (dense) return momentum_;
  const at::Tensor decoded = flat_zeros();
  auto* to = decoded.mutable_data_ptr<float>();
  if (device_.is_cuda()) {
    onebit_decode_cuda(exchange_->mean(), layout_.length(), to, control(nullptr), current_stream(device_));
    if (lamb_) lamb_->unscale(decoded);
    return decoded;
  }
  const kernels::OneBitAdamRows rows = this->rows(nullptr);
  float values[kernels::kOneBitRow];
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t begin = row * kernels::kOneBitRow;
    onebit_read_momentum(rows, row, std::min(kernels::kOneBitRow, rows.extent - begin), values);
    for (int64_t p = rows.first[row]; p < rows.first[row + 1]; ++p) {
      const kernels::OneBitPiece& piece = rows.pieces[p];
      std::copy_n(values + (piece.position - begin), piece.count, to + piece.position);
    }
  }
  return decoded;
}

void OneBitBucket::export_shared(NamedTensors& state) const {
  if (exchange_) exchange_->check(/*wait=*/true);
  const at::Tensor all = momentum();
  for (size_t i = 0; i < tensors_.size(); ++i) state[tensors_[i].name + "/exp_avg"] = view(all, i);
  if (lamb_) lamb_->export_state(state);
}

at::Tensor OneBitBucket::floored(size_t i) const {
  return view(variance_, i).lt(floors_.select(0, static_cast<int64_t>(i)).abs()).sum();
}

}  // namespace pacer::detail
