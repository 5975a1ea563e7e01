#include <pacer/compression/detail/onebit_exchange.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/device/detail/failure_text.h>

namespace pacer::detail {

using kernels::OneBitHeader;
using kernels::OneBitMessages;

int64_t exchange_alignment(const CompressionOptions& options) {
  const int64_t least = options.block_scales() ? kernels::kOneBitRow : kernels::kOneBitAlignment;
  const int64_t alignment = options.alignment().value_or(least);
  require(alignment > 0 && alignment % least == 0, "compression: alignment must be a multiple of ", least,
          " elements, not ", alignment);
  return alignment;
}

OneBitExchange::OneBitExchange(OneBitRoute route, std::vector<int64_t> counts,
                               const CompressionOptions& options)
    : route_(std::move(route)),
      options_(options),
      device_(route_.world().device()),
      layout_(std::move(counts), route_.workers(), exchange_alignment(options)),
      stride_(route_.message_bytes(kernels::onebit_message_bytes(layout_.chunk(), options.block_scales()))) {
  const int64_t workers = route_.workers();
  worker_ = make_side(layout_.rows(), 0, workers);
  server_ = make_side(layout_.served_rows(route_.worker()), route_.worker() * layout_.chunk(), 1);
  received_ = make_messages(workers);
  gathered_ = make_messages(workers);
  if (device_.is_cpu()) {
    signs_ = at::zeros({layout_.chunk() / 8 * workers}, at::kByte);
    return;
  }
  tensors_.host() = layout_.tensors();
  ends_.host() = layout_.ends();
  tensors_.send(device_);
  ends_.send(device_);
  status_ = at::zeros({static_cast<int64_t>(sizeof(kernels::OneBitStatus))},
                      at::TensorOptions().dtype(at::kByte).device(device_));
}

void OneBitExchange::agree(int64_t step) {
  if (route_.replicas().world_size() > 1) require_agreement(route_.replicas(), step, facts());
}

std::vector<Fact> OneBitExchange::facts() const {
  std::string sizes;
  for (const int64_t count : layout_.counts()) sizes += concatenate(sizes.empty() ? "" : " ", count);
  return {{"sizes of the compressed tensors", sizes},
          {"compression",
           concatenate(options_.scale() == ScaleNorm::rms ? "rms" : "l1", " scales",
                       options_.block_scales() ? " by blocks" : "", ", alignment ",
                       exchange_alignment(options_), ", by nodes of ", route_.ranks_per_worker(), " ranks")}};
}

at::Tensor OneBitExchange::make_messages(int64_t count) const {
  return at::zeros({stride_ * count}, at::TensorOptions().dtype(at::kByte).device(device_));
}

OneBitExchange::Side OneBitExchange::make_side(kernels::OneBitRows rows, int64_t origin,
                                               int64_t messages_to) const {
  const auto zeros = [&](int64_t count, at::ScalarType type) {
    return at::zeros({count}, at::TensorOptions().dtype(type).device(device_));
  };
  Side side;
  side.origin = origin;
  side.real_elements = rows.real_elements();
  side.carried = zeros(rows.extent, at::kFloat);
  side.scales = zeros(options_.block_scales() ? rows.count() : 1, at::kFloat);
  side.sums = zeros(options_.block_scales() ? rows.count() : rows.units(), at::kDouble);
  side.messages = make_messages(messages_to);
  side.messages_to = messages_to;
  side.rows = std::move(rows);
  return side;
}

kernels::OneBitSide OneBitExchange::view(const Side& side, unsigned char* signs) const {
  kernels::OneBitSide view{};
  view.pieces = side.rows.pieces.data();
  view.first = side.rows.first.data();
  view.rows = side.rows.count();
  view.extent = side.rows.extent;
  view.carried = side.carried.mutable_data_ptr<float>();
  view.scales = side.scales.const_data_ptr<float>();
  view.rows_scaled = options_.block_scales();
  view.norm = options_.scale();
  view.signs = signs;
  return view;
}

// The kernel over all units, then the scales. Returns the header's.
float OneBitExchange::compress(Side& side, unsigned char* signs, const kernels::OneBitSource& source) {
  const kernels::OneBitSide kernel_side = view(side, signs);
  auto* sums = side.sums.mutable_data_ptr<double>();
  at::parallel_for(0, side.rows.units(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      onebit_compress_cpu(kernel_side, source, unit, sums);
    }
  });
  auto* scales = side.scales.mutable_data_ptr<float>();
  if (!options_.block_scales()) {
    const double sum = sum_partials(sums, side.sums.numel());
    return scales[0] = kernels::onebit_scale_cpu(options_.scale(), sum, side.real_elements);
  }
  float nothing = 0;
  for (int64_t row = 0; row < side.rows.count(); ++row) {
    scales[row] = kernels::onebit_scale_cpu(options_.scale(), sums[row], side.rows.real_elements(row));
    nothing += scales[row] - scales[row];  // NaN where one is not finite
  }
  return nothing;
}

at::Tensor OneBitExchange::errors_of(const Side& side) const {
  if (device_.is_cuda()) return errors_on_device(side);
  const at::Tensor errors = at::empty({side.rows.extent}, at::kFloat);
  const kernels::OneBitSide kernel_side = view(side, nullptr);
  auto* values = errors.mutable_data_ptr<float>();
  for (int64_t row = 0; row < side.rows.count(); ++row) {
    onebit_errors_cpu(kernel_side, row, values + row * kernels::kOneBitRow);
  }
  return errors;
}

void OneBitExchange::set_errors(const at::Tensor& worker, const at::Tensor& server) {
  const auto check = [](const at::Tensor& errors, const char* which, int64_t elements) {
    require(errors.defined() && errors.scalar_type() == at::kFloat && errors.numel() == elements, "the ",
            which, " error of a 1-bit exchange must be fp32 of ", elements, " elements");
  };
  check(worker, "worker's", worker_.rows.extent);
  check(server, "server's", server_.rows.extent);
  worker_.carried.copy_(worker.view({-1}));
  server_.carried.copy_(server.view({-1}));
  worker_.scales.zero_();
  server_.scales.zero_();
  if (status_.defined()) status_.zero_();
  status_copy_.reset();
  latest_status_.reset();
  failure_.clear();
}

unsigned char* OneBitExchange::message(const at::Tensor& messages, int64_t number) const {
  return messages.mutable_data_ptr<uint8_t>() + number * stride_;
}

// The header and, where rows have scales of their own, those of `rows` rows; the chunk's others are 0.
void OneBitExchange::write_header(unsigned char* message, float scale, const float* row_scales, int64_t rows,
                                  int64_t step) const {
  OneBitHeader header{};
  header.scale = scale;
  header.rows_scaled = options_.block_scales();
  header.step = static_cast<uint32_t>(step);
  header.sequence = sequence_;
  std::memcpy(message, &header, sizeof header);
  if (options_.block_scales() && rows > 0) {
    std::memcpy(message + sizeof header, row_scales, static_cast<size_t>(rows) * sizeof(float));
  }
}

void OneBitExchange::check_headers(const at::Tensor& messages, int64_t step, const char* operation) const {
  for (int64_t rank = 0; rank < layout_.world_size(); ++rank) {
    OneBitHeader header{};
    std::memcpy(&header, message(messages, rank), sizeof header);
    require<Error>(header.step == static_cast<uint32_t>(step) && header.sequence == sequence_ &&
                       header.rows_scaled == static_cast<uint32_t>(options_.block_scales()),
                   operation, ": ", route_.name_of(rank), " sent the signs of step ", header.step, ", call ",
                   header.sequence, ", but this rank is at step ", step, ", call ", sequence_,
                   "; all ranks must take the same steps");
  }
}

// Every rank sees the same scales, so that all fail together.
void OneBitExchange::check_scales() const {
  for (int64_t rank = 0; rank < layout_.world_size(); ++rank) {
    OneBitHeader header{};
    std::memcpy(&header, message(gathered_, rank), sizeof header);
    require<Error>(std::isfinite(header.scale), "compressed all-reduce: the mean that ", route_.name_of(rank),
                   " serves is not finite; look for a momentum or gradient that overflows");
  }
}

kernels::OneBitMessages OneBitExchange::messages_in(const at::Tensor& tensor) const {
  OneBitMessages messages;
  messages.data = tensor.const_data_ptr<uint8_t>();
  messages.stride = stride_;
  messages.world_size = layout_.world_size();
  messages.chunk = layout_.chunk();
  messages.rows_scaled = options_.block_scales();
  return messages;
}

void OneBitExchange::keep_former_mean() {
  former_ = gathered_.clone();
  if (device_.is_cuda()) former_status_ = status_.clone();
}

kernels::OneBitMessages OneBitExchange::mean() const { return messages_in(gathered_); }

void OneBitExchange::check(bool wait) {
  if (device_.is_cuda() && failure_.empty()) note_failure(wait);
  require<Error>(failure_.empty(), "a 1-bit exchange failed half-way (", failure_,
                 "), and what its errors are worth is unknown; load a checkpoint");
}

void OneBitExchange::run(const OneBitInput& input, int64_t step) {
  start(input, step);
  serve();
  finish();
}

template <class F>
void OneBitExchange::guarded(const F& f) {
  if (layout_.length() == 0) return;
  try {
    f();
  } catch (const std::exception& error) {
    keep_failure(error, failure_);
    throw;
  }
}

void OneBitExchange::start(const OneBitInput& input, int64_t step) {
  check();
  guarded([&] {
    ++sequence_;
    step_ = step;
    check_ = input.check;
    device_.is_cuda() ? start_on_cuda(input) : start_on_cpu(input);
  });
}

void OneBitExchange::serve() {
  guarded([&] { device_.is_cuda() ? serve_on_cuda() : serve_on_cpu(); });
}

void OneBitExchange::finish() {
  guarded([&] { device_.is_cuda() ? finish_on_cuda() : finish_on_cpu(); });
}

void OneBitExchange::start_on_cpu(const OneBitInput& input) {
  const int64_t sign_bytes = layout_.chunk() / 8;
  auto* signs = signs_.mutable_data_ptr<uint8_t>();
  const float worker_scale = compress(worker_, signs, input.source);
  for (int64_t rank = 0; rank < layout_.world_size(); ++rank) {
    unsigned char* to = message(worker_.messages, rank);
    const int64_t first_row = options_.block_scales() ? rank * layout_.chunk() / kernels::kOneBitRow : 0;
    const int64_t rows = std::min(layout_.chunk() / kernels::kOneBitRow, worker_.rows.count() - first_row);
    write_header(to, worker_scale, worker_.scales.const_data_ptr<float>() + first_row, rows, step_);
    std::memcpy(to + stride_ - sign_bytes, signs + rank * sign_bytes, static_cast<size_t>(sign_bytes));
  }
  transfer_ = route_.all_to_all(received_, worker_.messages);
}

void OneBitExchange::serve_on_cpu() {
  transfer_.wait();
  check_headers(received_, step_, "compressed all_to_all");
  const int64_t sign_bytes = layout_.chunk() / 8;
  const OneBitMessages parts = messages_in(received_);
  unsigned char* own = message(server_.messages, 0);
  const auto mean_row = [&](int64_t row, int64_t width, float* values) {
    decode_mean_cpu(parts, row * kernels::kOneBitRow, width, values);
  };
  const float server_scale = compress(server_, own + stride_ - sign_bytes, mean_row);
  write_header(own, server_scale, server_.scales.const_data_ptr<float>(), server_.rows.count(), step_);
  if (former_.defined()) std::swap(gathered_, former_);
  transfer_ = route_.all_gather(gathered_, server_.messages);
}

void OneBitExchange::finish_on_cpu() {
  transfer_.wait();
  check_headers(gathered_, step_, "compressed all_gather");
  bytes_sent_ += route_.bytes_sent(stride_);
  check_scales();
}

}  // namespace pacer::detail
