#include <pacer/compression/compressed_all_reduce.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer {
namespace {

// The buffer as rows of one tensor.
struct Buffer {
  float* elements;
  const kernels::OneBitRows* rows;
};

void write_rows(const kernels::OneBitMessages& mean, const Buffer& buffer) {
  float values[kernels::kOneBitRow];
  for (const kernels::OneBitPiece& piece : buffer.rows->pieces) {
    decode_buffer_cpu(mean, piece.position, (int64_t{piece.count} + 7) / 8 * 8, values);
    std::memcpy(buffer.elements + piece.offset, values, piece.count * sizeof(float));
  }
}

std::shared_ptr<Communicator> checked(std::shared_ptr<Communicator> world, int64_t size) {
  require(world != nullptr, "a CompressedAllReduce needs a Communicator");
  require(size >= 0, "a CompressedAllReduce needs a size >= 0, not ", size);
  return world;
}

}  // namespace

CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> world, int64_t size,
                                         const CompressionOptions& options)
    : CompressedAllReduce(std::move(world), size, options, Unagreed()) {
  agree();
}
CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> world, int64_t size,
                                         const CompressionOptions& options, Unagreed /*mark*/)
    : exchange_(std::make_unique<detail::OneBitExchange>(
          detail::OneBitRoute(checked(std::move(world), size), options.hierarchical()),
          std::vector<int64_t>{size}, options)) {
  compresses_ = exchange_->route().workers() > 1 || options.compress_alone();
}
CompressedAllReduce::~CompressedAllReduce() = default;

void CompressedAllReduce::agree() { exchange_->agree(/*step=*/0); }

void CompressedAllReduce::reduce(const at::Tensor& buffer) { reduce(buffer, /*check=*/nullptr); }

void CompressedAllReduce::reduce(const at::Tensor& buffer, const kernels::GradientCheck* check) {
  require(buffer.defined() && buffer.scalar_type() == at::kFloat && buffer.is_contiguous() &&
              buffer.numel() == size() && buffer.device() == exchange_->route().world().device(),
          "CompressedAllReduce::reduce needs a contiguous fp32 tensor of ", size(), " elements on ",
          exchange_->route().world().device().str());
  exchange_->check();
  if (size() == 0) return;
  if (exchange_->route().is_by_nodes()) average_in_node(buffer);
  if (!compresses_) return;
  const Buffer rows{buffer.mutable_data_ptr<float>(), &exchange_->rows()};
  detail::OneBitInput input;
  input.check = check;
  input.source = [&](int64_t row, int64_t /*width*/, float* values) {
    const kernels::OneBitPiece& piece = rows.rows->pieces[static_cast<size_t>(row)];
    std::memcpy(values, rows.elements + piece.offset, piece.count * sizeof(float));
  };
  input.enqueue = [&](const auto& side, const auto& control, kernels::Stream stream) {
    onebit_compress_values_cuda(side, rows.elements, control, stream);
  };
  exchange_->run(input, calls_);
  ++calls_;
  if (buffer.is_cpu()) return write_rows(exchange_->mean(), rows);
  const c10::DeviceGuard guard(buffer.device());
  onebit_decode_cuda(exchange_->mean(), size(), rows.elements, exchange_->control(check),
                     detail::current_stream(buffer.device()));
}

void CompressedAllReduce::average_in_node(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  const detail::OneBitRoute& route = exchange_->route();
  route.world().node()->all_reduce(buffer, CollectiveOptions().agreed(true).ordered_sum(true)).wait();
  buffer.mul_(1.0 / static_cast<double>(route.ranks_per_worker()));
}

void CompressedAllReduce::check(bool wait) const { exchange_->check(wait); }

int64_t CompressedAllReduce::size() const { return exchange_->layout().counts().front(); }

CompressedAllReduce::Range CompressedAllReduce::served() const {
  const int64_t begin = exchange_->route().worker() * exchange_->layout().chunk();
  return {std::min(size(), begin), std::min(size(), begin + exchange_->layout().chunk())};
}

at::Tensor CompressedAllReduce::worker_error() const {
  return exchange_->worker_errors().narrow(0, 0, size()).clone();
}

at::Tensor CompressedAllReduce::server_error() const {
  const Range range = served();
  return exchange_->server_errors().narrow(0, 0, range.end - range.begin).clone();
}

void CompressedAllReduce::set_errors(const at::Tensor& worker, const at::Tensor& server) {
  const Range range = served();
  const at::Device device = exchange_->route().world().device();
  const auto padded = [&](const at::Tensor& errors, const char* which, int64_t count, int64_t length) {
    require(errors.defined() && errors.scalar_type() == at::kFloat && errors.numel() == count,
            "CompressedAllReduce::set_errors needs a ", which, " error of ", count, " fp32 elements");
    at::Tensor whole = at::zeros({length}, at::TensorOptions().dtype(at::kFloat).device(device));
    whole.narrow(0, 0, count).copy_(errors.reshape({-1}));
    return whole;
  };
  const at::Tensor own = padded(worker, "worker", size(), exchange_->rows().extent);
  const at::Tensor serving =
      padded(server, "server", range.end - range.begin, exchange_->served_rows().extent);
  exchange_->set_errors(own, serving);
}

int64_t CompressedAllReduce::bytes_sent() const { return exchange_->bytes_sent(); }

}  // namespace pacer
