// The exchange on CUDA: kernels and collectives follow one another on the device, and the host learns late
// what became of them.
//
// Where the gradients were not finite, on every rank alike, the kernels do nothing, and the collectives send
// the messages of the call before once more: what they overwrite has the same bytes.
#include <algorithm>
#include <cstring>

#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer::detail {
namespace {

kernels::OneBitStatus status_in(const at::Tensor& host) {
  kernels::OneBitStatus status{};
  std::memcpy(&status, host.const_data_ptr(), sizeof status);
  return status;
}

}  // namespace

kernels::OneBitCudaSide OneBitExchange::cuda_view(const Side& side) const {
  kernels::OneBitCudaSide view{};
  view.tensors = tensors_.pointer();
  view.ends = ends_.pointer();
  view.origin = side.origin;
  view.extent = side.rows.extent;
  view.real_elements = side.real_elements;
  view.carried = side.carried.mutable_data_ptr<float>();
  view.scales = side.scales.mutable_data_ptr<float>();
  view.rows_scaled = options_.block_scales();
  view.norm = options_.scale();
  view.messages = side.messages.mutable_data_ptr<uint8_t>();
  view.stride = stride_;
  view.chunk = layout_.chunk();
  view.message_count = side.messages_to;
  view.sums = side.sums.mutable_data_ptr<double>();
  return view;
}

kernels::OneBitControl OneBitExchange::control(const kernels::GradientCheck* check) const {
  return {check, static_cast<kernels::OneBitStatus*>(status_.mutable_data_ptr())};
}

const kernels::OneBitStatus* OneBitExchange::former_status() const {
  if (!former_status_.defined()) return nullptr;
  return static_cast<const kernels::OneBitStatus*>(former_status_.const_data_ptr());
}

void OneBitExchange::start_on_cuda(const OneBitInput& input) {
  const c10::DeviceGuard guard(device_);
  const kernels::Stream stream = current_stream(device_);
  const kernels::OneBitControl control = this->control(check_);
  if (former_.defined()) former_status_.copy_(status_);
  const kernels::OneBitCudaSide worker = cuda_view(worker_);
  input.enqueue(worker, control, stream);
  onebit_finish_side_cuda(worker, call(), control, stream);
  transfer_ = route_.all_to_all(received_, worker_.messages);
}

void OneBitExchange::serve_on_cuda() {
  const c10::DeviceGuard guard(device_);
  transfer_.wait();
  const kernels::Stream stream = current_stream(device_);
  const kernels::OneBitControl control = this->control(check_);
  const kernels::OneBitCudaSide server = cuda_view(server_);
  const kernels::OneBitMessages parts = messages_in(received_);
  onebit_check_messages_cuda(parts, call(), /*as_mean=*/false, control, stream);
  onebit_compress_mean_cuda(server, parts, control, stream);
  onebit_finish_side_cuda(server, call(), control, stream);
  // A step that is skipped sends its last messages once more, so that either memory has the mean then.
  if (former_.defined()) std::swap(gathered_, former_);
  transfer_ = route_.all_gather(gathered_, server_.messages);
}

void OneBitExchange::finish_on_cuda() {
  const c10::DeviceGuard guard(device_);
  transfer_.wait();
  onebit_check_messages_cuda(mean(), call(), /*as_mean=*/true, control(check_), current_stream(device_));
  bytes_sent_ += route_.bytes_sent(stride_);
  mean_was_forgotten_ = false;
  latest_status();
  if (status_copy_ == nullptr) status_copy_ = start_host_copy(status_);
}

void OneBitExchange::forget_mean(const kernels::GradientCheck* check) {
  onebit_forget_mean_cuda(control(check), current_stream(device_));
  mean_was_forgotten_ = true;
}

// The last copy that arrived; none before. Never waits.
std::optional<kernels::OneBitStatus> OneBitExchange::latest_status() {
  if (status_copy_ != nullptr && status_copy_->arrived()) {
    latest_status_ = status_in(status_copy_->value());
    status_copy_.reset();
  }
  return latest_status_;
}

bool OneBitExchange::is_known_to_have_mean() {
  const auto status = latest_status();
  return !mean_was_forgotten_ && status && status->has_mean != 0 && status->sequence == sequence_;
}

bool OneBitExchange::has_mean() const { return status_in(status_.cpu()).has_mean != 0; }

void OneBitExchange::note_failure(bool wait) {
  const auto status = wait ? status_in(status_.cpu()) : latest_status().value_or(kernels::OneBitStatus{});
  switch (status.failure) {
    case kernels::OneBitFailure::none:
      return;
    case kernels::OneBitFailure::other_call:
      failure_ = concatenate(route_.name_of(status.rank), " sent the signs of step ", status.step, ", call ",
                             status.sequence, ", but this rank was at step ", step_, ", call ", sequence_,
                             ", or before; all ranks must take the same steps");
      return;
    case kernels::OneBitFailure::not_finite:
      failure_ = concatenate("the mean that ", route_.name_of(status.rank),
                             " serves is not finite; look for a momentum or gradient that overflows");
  }
}

at::Tensor OneBitExchange::errors_on_device(const Side& side) const {
  at::Tensor scales = side.scales;
  if (options_.block_scales()) {
    scales = scales.repeat_interleave(kernels::kOneBitRow).narrow(0, 0, side.rows.extent);
  }
  const at::Tensor errors = side.carried.sub(at::where(side.carried.lt(0), scales.neg(), scales));
  // What lies behind a tensor's last element is padding.
  for (size_t i = 0; i < layout_.counts().size(); ++i) {
    const int64_t begin = layout_.offset(i) + layout_.counts()[i] - side.origin;
    const int64_t next = i + 1 < layout_.counts().size() ? layout_.offset(i + 1) : layout_.length();
    const int64_t from = std::clamp<int64_t>(begin, 0, side.rows.extent);
    const int64_t to = std::clamp<int64_t>(next - side.origin, from, side.rows.extent);
    if (from < to) errors.narrow(0, from, to - from).zero_();
  }
  return errors;
}

}  // namespace pacer::detail
