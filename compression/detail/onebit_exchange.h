// One 1-bit all-reduce with error feedback, as CompressedAllReduce and the 1-bit optimizers share it: the
// flat buffer's layout, both errors, the messages, and the two collectives between the kernels. Who has the
// numbers gives them to the compressing kernel, and reads the mean from the messages that came last.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/communicator.h>
#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/compression/detail/onebit_route.h>
#include <pacer/device/detail/device_buffer.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/kernels/onebit.h>

namespace pacer::detail {

// Returns the alignment of chunks, in elements. Throws InvalidArgument for options that cannot be.
int64_t exchange_alignment(const CompressionOptions& options);

// What is exchanged: row by row on the CPU, all at once by a kernel that is enqueued on CUDA.
struct OneBitInput {
  kernels::OneBitSource source;
  std::function<void(const kernels::OneBitCudaSide&, const kernels::OneBitControl&, kernels::Stream)> enqueue;
  // Gradients of the numbers, on the device; where they are not finite nothing changes. CUDA only, may be
  // null.
  const kernels::GradientCheck* check = nullptr;
};

class OneBitExchange {
 public:
  // Tensors of so many elements, the same on all that exchange them.
  OneBitExchange(OneBitRoute route, std::vector<int64_t> counts, const CompressionOptions& options);
  // Throws CommunicationError on every rank where sizes or options differ.
  void agree(int64_t step);
  // What it compares.
  std::vector<Fact> facts() const;

  const kernels::OneBitLayout& layout() const { return layout_; }
  const kernels::OneBitRows& rows() const { return worker_.rows; }
  const kernels::OneBitRows& served_rows() const { return server_.rows; }
  const OneBitRoute& route() const { return route_; }
  // See OneBitRoute::use_lanes.
  void use_lanes() { route_.use_lanes(); }

  // The mean over ranks of the input. `step` is compared over ranks. Throws Error where something fails on
  // the way or a number is not finite, on CUDA in a later call, and from then on, until set_errors.
  void run(const OneBitInput& input, int64_t step);
  // run() in three parts, for other work while messages travel, other exchanges among it; all ranks start the
  // parts of all exchanges in the same order. start: the input, which is not needed any more then, is
  // compressed and leaves. serve: once all have come, their mean does. finish: mean() is there.
  void start(const OneBitInput& input, int64_t step);
  void serve();
  void finish();
  // After start: whether all have come.
  bool can_serve() const { return transfer_.is_done(); }
  // Throws where run() failed before; with `wait` also where the host does not know yet.
  void check(bool wait = false);
  // The mean that the last run() left, by chunks.
  kernels::OneBitMessages mean() const;
  // From now on the mean before the last run() is kept as well, and on CUDA the status before it.
  void keep_former_mean();
  kernels::OneBitMessages former_mean() const { return messages_in(former_); }
  const kernels::OneBitStatus* former_status() const;  // null on the CPU

  // ---- CUDA, where only the device knows whether a run() changed anything ----

  kernels::OneBitControl control(const kernels::GradientCheck* check) const;
  // Enqueued: something newer than the messages is the mean from now on.
  void forget_mean(const kernels::GradientCheck* check);
  // True once the host knows that the messages hold the newest mean; never waits.
  bool is_known_to_have_mean();
  // Whether they do. Waits for the device.
  bool has_mean() const;

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
    int64_t origin = 0;   // of the first element in the buffer
    at::Tensor carried;   // fp32
    at::Tensor scales;    // fp32: one, or one for each row
    at::Tensor sums;      // fp64, one for each unit, or for each row
    at::Tensor messages;  // bytes
    int64_t messages_to = 0;
    int64_t real_elements = 0;
  };

  Side make_side(kernels::OneBitRows rows, int64_t origin, int64_t messages_to) const;
  at::Tensor make_messages(int64_t count) const;
  kernels::OneBitSide view(const Side& side, unsigned char* signs) const;
  kernels::OneBitCudaSide cuda_view(const Side& side) const;
  at::Tensor errors_of(const Side& side) const;
  at::Tensor errors_on_device(const Side& side) const;
  float compress(Side& side, unsigned char* signs, const kernels::OneBitSource& source);
  unsigned char* message(const at::Tensor& messages, int64_t number) const;
  void write_header(unsigned char* message, float scale, const float* row_scales, int64_t rows,
                    int64_t step) const;
  void check_headers(const at::Tensor& messages, int64_t step, const char* operation) const;
  void check_scales() const;
  kernels::OneBitMessages messages_in(const at::Tensor& tensor) const;
  std::optional<kernels::OneBitStatus> latest_status();
  void note_failure(bool wait);
  template <class F>
  void guarded(const F& f);
  kernels::OneBitCall call() const { return {step_, sequence_}; }
  void start_on_cpu(const OneBitInput& input);
  void serve_on_cpu();
  void finish_on_cpu();
  void start_on_cuda(const OneBitInput& input);
  void serve_on_cuda();
  void finish_on_cuda();

  OneBitRoute route_;
  CompressionOptions options_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  int64_t stride_;  // bytes of a message
  Side worker_, server_;
  at::Tensor signs_;                // CPU: bytes: the worker's, of the whole buffer
  at::Tensor received_, gathered_;  // bytes: messages
  at::Tensor former_;               // gathered before; undefined where nobody asks
  DeviceBuffer<uint32_t> tensors_;  // CUDA: the layout
  DeviceBuffer<int64_t> ends_;
  at::Tensor status_;  // CUDA: a kernels::OneBitStatus
  at::Tensor former_status_;
  std::unique_ptr<HostCopy> status_copy_;               // a copy of it on its way to the host
  std::optional<kernels::OneBitStatus> latest_status_;  // that has arrived
  bool mean_was_forgotten_ = false;
  OneBitTransfer transfer_;                        // between the parts of a run
  const kernels::GradientCheck* check_ = nullptr;  // of the last run
  uint32_t sequence_ = 0;
  int64_t step_ = 0;  // of the last run
  int64_t bytes_sent_ = 0;
  std::string failure_;
};

}  // namespace pacer::detail
