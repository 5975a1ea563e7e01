#include "cuda_timing.h"

#include <algorithm>
#include <exception>
#include <memory>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>

namespace bench {
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

Spread time_enqueued(const std::function<void()>& enqueue, double spin_milliseconds,
                     const Patience& patience) {
  at::cuda::CUDAEvent begin(cudaEventDefault);
  at::cuda::CUDAEvent end(cudaEventDefault);
  // Nominal clock; a GPU that boosts further spins a little shorter.
  const double cycles_per_millisecond = at::cuda::getCurrentDeviceProperties()->major >= 8 ? 1.7e6 : 1.4e6;
  return repeat(patience, [&] {
    at::cuda::sleep(static_cast<int64_t>(spin_milliseconds * cycles_per_millisecond));
    begin.record();
    enqueue();
    end.record();
    end.synchronize();
    return static_cast<double>(begin.elapsed_time(end));
  });
}

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

}  // namespace bench
