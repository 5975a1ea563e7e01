// One 1-bit all-reduce with error feedback, as CompressedAllReduce and the 1-bit optimizers share it: the
// flat buffer's layout, both errors, the messages, and the two collectives between the kernels. Who has the
// numbers gives them row by row, and reads the mean from the messages that came last.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/compressed_all_reduce.h>
#include <pacer/kernels/onebit.h>

namespace pacer::detail {

// Of chunks, in elements. Throws InvalidArgument for options that cannot be.
int64_t exchange_alignment(const CompressionOptions& options);

class OneBitExchange {
 public:
  // Tensors of so many elements, the same on every rank.
  OneBitExchange(std::shared_ptr<Communicator> world, std::vector<int64_t> counts,
                 const CompressionOptions& options);
  // Throws CommunicationError on every rank where sizes or options differ.
  void agree(int64_t step);

  const kernels::OneBitLayout& layout() const { return layout_; }
  const kernels::OneBitRows& rows() const { return worker_.rows; }
  const kernels::OneBitRows& served_rows() const { return server_.rows; }
  Communicator& world() const { return *world_; }

  // The mean over ranks of the source's rows. `step` is compared over ranks. Throws Error where something
  // fails on the way or a number is not finite, and from then on, until set_errors.
  void run(kernels::OneBitSource source, const void* context, int64_t step);
  // Throws where run() failed before.
  void check() const;
  // The mean that the last run() left, by chunks.
  kernels::OneBitMessages mean() const;

  // fp32: of the whole buffer (layout().length()) and of the served part, padding 0.
  at::Tensor worker_errors() const { return errors_of(worker_); }
  at::Tensor server_errors() const { return errors_of(server_); }
  // What the worker last rounded to signs. Shares memory.
  const at::Tensor& worker_carried() const { return worker_.carried; }
  void set_errors(const at::Tensor& worker, const at::Tensor& server);

  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  // Memory of a worker or a server.
  struct Side {
    kernels::OneBitRows rows;
    at::Tensor carried;  // fp32
    at::Tensor scales;   // fp32: one, or one for each row
    std::vector<double> sums;
    int64_t real_elements = 0;
  };

  Side make_side(kernels::OneBitRows rows) const;
  kernels::OneBitSide view(const Side& side, unsigned char* signs) const;
  at::Tensor errors_of(const Side& side) const;
  void compress(Side& side, unsigned char* signs, kernels::OneBitSource source, const void* context);
  unsigned char* message(const at::Tensor& messages, int64_t number) const;
  void write_header(unsigned char* message, const float* scales, int64_t rows, int64_t step) const;
  void check_headers(const at::Tensor& messages, int64_t step, const char* operation) const;
  void check_scales() const;
  kernels::OneBitMessages messages_in(const at::Tensor& tensor) const;
  void run_unguarded(kernels::OneBitSource source, const void* context, int64_t step);

  std::shared_ptr<Communicator> world_;
  CompressionOptions options_;
  kernels::OneBitLayout layout_;
  int64_t stride_;  // bytes of a message
  Side worker_, server_;
  at::Tensor signs_;                                // bytes: the worker's, of the whole buffer
  at::Tensor sent_, received_, served_, gathered_;  // bytes: messages
  uint32_t sequence_ = 0;
  int64_t bytes_sent_ = 0;
  std::string failure_;
};

}  // namespace pacer::detail
