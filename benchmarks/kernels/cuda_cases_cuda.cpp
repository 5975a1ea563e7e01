#include <dlfcn.h>

#include <exception>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <pacer/core/error.h>

#include "contenders.h"
#include "runs.h"
#include "support/gpu_time.h"
#include "support/table.h"

namespace bench::kernels {
namespace {

// Of the driver package; the CUDA runtime only knows the CUDA version it supports.
std::string driver_version() {
  char version[96] = "unknown";
  void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return version;
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto read = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
  const auto shutdown = reinterpret_cast<int (*)()>(dlsym(library, "nvmlShutdown"));
  if (init && read && shutdown && init() == 0) {
    if (read(version, sizeof version) != 0) std::snprintf(version, sizeof version, "unknown");
    shutdown();
  }
  dlclose(library);
  return version;
}

std::string cuda_version_text(int version) { return format("%d.%d", version / 1000, version % 1000 / 10); }

int64_t free_gpu_memory() {
  c10::cuda::CUDACachingAllocator::emptyCache();
  size_t free = 0;
  size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

// Device-to-device copy of a buffer far larger than the L2 cache, in bytes read plus written per second.
double measure_copy(const std::string& model, const Patience& patience, Report& report) {
  constexpr int64_t kMostBytes = int64_t{4} << 30;
  const int64_t bytes = std::min(kMostBytes, free_gpu_memory() / 4) / 16 * 16;
  const auto options = at::TensorOptions().device(at::kCUDA).dtype(at::kInt);
  const at::Tensor from = at::randint(1, 1 << 30, {bytes / 4}, options);
  const at::Tensor to = at::empty_like(from);
  const auto copy = [&] {
    C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), bytes,
                                   cudaMemcpyDeviceToDevice, at::cuda::getCurrentCUDAStream()));
  };
  for (int i = 0; i < kComparedSteps; ++i) copy();
  const Spread spread = time_enqueued(copy, 0.05, patience);
  const double per_second = 2.0 * static_cast<double>(bytes) / (spread.median * 1e-3);
  report.bandwidth("cuda/" + model, "copy", per_second);
  return per_second;
}

struct CudaPatience {
  Patience device;
  Patience called;      // runs of steps
  int64_t steps_a_run;  // at most
  Patience host;
};

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

// Times `step`, which enqueues work on the current stream (not the default stream, so that it can be
// captured) and has been called before. Three timings:
//   called: wall clock per step over a run of steps that a synchronisation ends;
//   host:   wall clock of one call, the queue being empty;
//   device: between two events around the replay of the step as a CUDA graph. A kernel that spins goes
//           first, so that the device never waits for the host. A step that cannot be captured is enqueued
//           behind a longer spin.
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

// One contender at a time, because the largest cases fill a good part of the memory. The first peer goes
// first: its results are what the others are compared with.
CaseResult run_case(const Case& which, const Ceiling& ceiling, const CudaPatience& patience, Report& report) {
  CaseResult result{which, 0, {}};
  const std::vector<ContenderPlan> plans = contender_plans(which.work, Device::cuda);
  ModelData data = make_model_data(which.model(), which.work, at::kCUDA);
  Reference reference = exact_reference(which.work, data);
  std::vector<Measurement> measurements(plans.size());
  std::vector<size_t> order = {1, 0};
  for (size_t i = 2; i < plans.size(); ++i) order.push_back(i);
  for (const size_t i : order) {
    try {
      pacer::require<pacer::Error>(i == 1 || !reference.results.empty(),
                                   "there is nothing to compare it with");
      const Contender contender = plans[i].make(data);
      for (int k = 0; k < kComparedSteps; ++k) contender.step();
      if (reference.results.empty()) {
        for (const auto& tensor : contender.results) reference.results.push_back(tensor.detach().clone());
      }
      require_agreement(plans[i], contender, reference);
      measurements[i] = {plans[i].name, plans[i].meaning, time_on_cuda(contender.step, patience, ceiling)};
      report.progress(result, measurements[i]);
    } catch (const std::exception& error) {
      report.failed(which.name + ", " + plans[i].name, error.what());
    }
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  for (auto& measurement : measurements) {
    if (!measurement.timings.empty()) result.measurements.push_back(std::move(measurement));
  }
  return result;
}

CudaPatience cuda_patience(const Effort& effort) {
  CudaPatience patience{{25, 5, 2}, {5, 3, 2}, 20, {25, 3, 2}};
  if (effort.quick) patience = {{11, 3, 0.5}, {3, 1, 0.5}, 10, {11, 2, 0.5}};
  if (effort.repetitions > 0) {
    patience.device = patience.host = {effort.repetitions, effort.repetitions, 0};
  }
  return patience;
}

}  // namespace

std::string obstacle_to_cuda() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return std::string("the CUDA runtime says: ") + cudaGetErrorString(status);
  }
  return devices > 0 ? "" : "this machine has no GPU";
}

std::vector<std::pair<std::string, std::string>> gpu_facts() {
  const cudaDeviceProp& gpu = *at::cuda::getCurrentDeviceProperties();
  int runtime = 0;
  int supported = 0;
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  C10_CUDA_CHECK(cudaDriverGetVersion(&supported));
  return {{"gpu", gpu.name},
          {"gpu_size", format("%d multiprocessors, %.1f GiB, %.0f MiB L2", gpu.multiProcessorCount,
                              static_cast<double>(gpu.totalGlobalMem) / (1 << 30),
                              static_cast<double>(gpu.l2CacheSize) / (1 << 20))},
          {"driver", driver_version()},
          {"cuda", "runtime " + cuda_version_text(runtime) + ", driver " + cuda_version_text(supported)}};
}

void run_on_cuda(const std::vector<Case>& cases, const Effort& effort, Report& report) {
  // Everything runs on one stream that is not the default one, because that one cannot be captured.
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const CudaPatience patience = cuda_patience(effort);
  std::string model;
  Ceiling ceiling;
  for (const Case& which : cases) {
    try {
      if (which.model().name != model) {  // again for every model, in case the clocks of the GPU drift
        model = which.model().name;
        ceiling.copy = measure_copy(model, patience.device, report);
      }
      const int64_t needed = which.model().parameters() * facts_of(which.work).peak_bytes_per_parameter;
      if (!report.has_room(which.name, "GPU memory", needed, free_gpu_memory())) continue;
      report.add(run_case(which, ceiling, patience, report));
    } catch (const std::exception& error) {
      report.failed(which.name, error.what());
    }
    // After an illegal access every further call fails; what was measured so far is still reported.
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
      report.failed(which.name, format("the GPU cannot be used any more: %s", cudaGetErrorString(status)));
      return;
    }
  }
}

}  // namespace bench::kernels
