#include "cuda_timing.h"

#include <algorithm>
#include <exception>
#include <memory>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>

#include "support/gpu_time.h"

namespace bench::kernels {
namespace {

// Long enough for the host to enqueue two events and a graph launch of one kernel.
constexpr double kSpinMilliseconds = 0.1;

// Null where the step cannot be captured.
std::unique_ptr<at::cuda::CUDAGraph> captured(const std::function<void()>& step) {
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  bool capturing = false;
  try {
    graph->capture_begin();
    capturing = true;
    step();
    graph->capture_end();
    return graph;
  } catch (const std::exception&) {
    // A capture that was broken off must still be ended, or the stream stays unusable.
    try {
      if (capturing) graph->capture_end();
    } catch (const std::exception&) {
    }
    (void)cudaGetLastError();
    return nullptr;
  }
}

}  // namespace

std::vector<Timing> time_on_cuda(const std::function<void()>& step, const CudaPatience& patience,
                                 const Ceiling& ceiling) {
  const auto stream = at::cuda::getCurrentCUDAStream();
  stream.synchronize();

  // As called comes first: after a capture an optimizer may have to look at the device where it need not
  // before.
  const Spread called = repeat(patience.called, [&] {
    const Stopwatch run;
    int64_t steps = 0;
    // A slow step ends its run early; the steps queued by then are waited for, and counted.
    for (; steps < patience.steps_a_run && (steps < 2 || run.seconds() < 1); ++steps) step();
    stream.synchronize();
    return run.milliseconds() / static_cast<double>(steps);
  });
  const Spread host = repeat(patience.host, [&] {
    stream.synchronize();
    const Stopwatch call;
    step();
    return call.milliseconds();
  });
  stream.synchronize();

  Timing device{"device", "graph", {}, ceiling};
  if (const auto graph = captured(step)) {
    graph->replay();
    stream.synchronize();
    device.milliseconds = time_enqueued([&] { graph->replay(); }, kSpinMilliseconds, patience.device);
  } else {
    device.method = "queued";
    device.milliseconds = time_enqueued(step, kSpinMilliseconds + 1.5 * host.max, patience.device);
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return {device, {"called", "run", called, ceiling}, {"host", "call", host, {}}};
}

}  // namespace bench::kernels
