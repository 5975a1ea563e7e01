// Ranks that stop, die, stay away, give up or say why: the others throw in time, their GPU is free again, and
// their processes end in the normal way.
#include <csignal>
#include <thread>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "nccl/scenarios.h"
#include "support/message_of.h"

namespace pacer::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using TransportPtr = std::shared_ptr<detail::Transport>;

// What is promised after a deadline.
constexpr double kGrace = 10;

at::Tensor ones_for(const RankProcess& process) {
  return at::ones({100000}, at::TensorOptions(process.device()).dtype(at::kFloat));
}

void sum_once(const RankProcess& process, const TransportPtr& transport) {
  const at::Tensor tensor = ones_for(process);
  transport->all_reduce(tensor, seconds(20))->wait();
  expect(tensor.eq(process.world()).all().item<bool>(), "a wrong sum before the trouble");
}

// An operation that cannot end: it throws, or a later check does, once the stream is free again. Returns the
// reason; the operation must not be done before `least` seconds and must have failed after `most`.
std::string expect_failure(RankProcess& process, const TransportPtr& transport, milliseconds timeout,
                           double most) {
  const Stopwatch watch;
  detail::TransportWorkPtr work;
  std::string reason = message_of([&] {
    work = transport->all_reduce(ones_for(process), timeout);
    work->wait();
    const cudaError_t error = cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream());
    if (error != cudaSuccess) process.inform(std::string("the stream says ") + cudaGetErrorString(error));
    // The abort of a neighbour whose deadline came first can let this rank's operation end, with whatever was
    // there; then it must be the next one that fails.
    while (watch.seconds() < most) {
      transport->check();
      if (work->is_done()) work = transport->all_reduce(ones_for(process), timeout);
      std::this_thread::sleep_for(milliseconds(10));
    }
  });
  process.inform("after " + std::to_string(watch.seconds()) + " s: " + reason);
  expect(!reason.empty(), "an operation without all ranks did not fail");
  expect(watch.seconds() < most, "it failed too late");
  if (work) {
    expect(work->is_done(), "a failed operation is not done");
    expect(!message_of([&] { work->wait(); }).empty(), "wait() after a failure does not throw");
  }
  expect(!message_of([&] { transport->all_reduce(ones_for(process), timeout); }).empty(),
         "an operation after a failure does not throw");
  return reason;
}

void expect_end(TransportPtr& transport) {
  const Stopwatch watch;
  transport->abort();
  transport.reset();
  expect(watch.seconds() < 11, "the end took " + std::to_string(watch.seconds()) + " s");
}

}  // namespace

void run_stopped(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("stopped", seconds(30));
  sum_once(process, transport);
  process.meet("ready", process.world());
  if (process.is_last()) raise(SIGSTOP);
  process.check("a stopped rank: the deadline holds", [&] {
    bool is_timeout = false;
    expect_failure(process, transport, seconds(3), 3 + kGrace);
    try {
      transport->check();
    } catch (const detail::TransportTimeout&) {
      is_timeout = true;
    }
    expect(is_timeout, "the failure is not a TransportTimeout");
    expect_end(transport);
  });
}

void run_stopped_before_first_use(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("stopped-early", seconds(30));
  process.meet("ready", process.world());
  if (process.is_last()) raise(SIGSTOP);
  process.check("a rank stopped before the first operation: the deadline holds", [&] {
    expect_failure(process, transport, seconds(2), 2 + kGrace);
    expect_end(transport);
  });
}

void run_killed(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("killed", seconds(30));
  sum_once(process, transport);
  process.meet("ready", process.world());
  if (process.is_last()) raise(SIGKILL);
  process.check("a killed rank: the others fail in time", [&] {
    expect_failure(process, transport, seconds(3), 3 + kGrace);
    expect_end(transport);
  });
}

void run_absent_at_set_up(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  process.check("a rank that does not come to the set-up", [&] {
    if (process.is_last()) return;
    const Stopwatch watch;
    const std::string reason = message_of([&] { process.connect("absent", seconds(3)); });
    process.inform("after " + std::to_string(watch.seconds()) + " s: " + reason);
    expect(!reason.empty(), "set up without all ranks");
    expect(watch.seconds() > 2.5 && watch.seconds() < 3 + kGrace, "not by the deadline");
  });
}

void run_abort(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("abort", seconds(30));
  sum_once(process, transport);
  process.meet("ready", process.world());
  process.check("abort by another thread ends what is under way", [&] {
    if (process.rank() == 0) {
      std::thread other([&] {
        std::this_thread::sleep_for(milliseconds(500));
        transport->abort();
      });
      const std::string reason = message_of([&] { expect_failure(process, transport, seconds(30), 8); });
      other.join();
      expect(reason.empty(), reason);
      transport->abort();
    }
    process.meet("aborted", process.world());
    expect_end(transport);
  });
}

void run_trouble(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  const std::string text = "rank 1 has left: no disk space";
  auto transport = process.connect("trouble", seconds(30), [&] { return process.read("trouble"); });
  sum_once(process, transport);
  process.meet("ready", process.world());
  process.check("trouble elsewhere ends an operation long before its deadline", [&] {
    if (process.is_last()) {
      std::this_thread::sleep_for(milliseconds(300));
      process.post("trouble", text);
    } else {
      const std::string reason = expect_failure(process, transport, seconds(30), 8);
      expect(reason.find(text) != std::string::npos, "the reason is lost: " + reason);
    }
    process.meet("left", process.world());
    expect_end(transport);
  });
}

void run_unfinished(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("unfinished", seconds(30));
  sum_once(process, transport);
  process.meet("ready", process.world());
  process.check("operations under way do not keep the end waiting", [&] {
    std::vector<detail::TransportWorkPtr> works;
    if (process.rank() == 0) {
      for (int i = 0; i < 3; ++i) works.push_back(transport->all_reduce(ones_for(process), seconds(30)));
    } else {
      process.wait_for("rank-0-ended");
    }
    const Stopwatch watch;
    transport.reset();
    process.inform("ended in " + std::to_string(watch.seconds()) + " s");
    if (process.rank() == 0) process.post("rank-0-ended");
    expect(watch.seconds() < 6, "the end took " + std::to_string(watch.seconds()) + " s");
    for (const auto& work : works) {
      expect(work->is_done() && !message_of([&] { work->wait(); }).empty(), "a work outlived its transport");
    }
    works.clear();
    expect(cudaDeviceSynchronize() == cudaSuccess, "the GPU is not free");
  });
  process.check("a new transport in the same process", [&] {
    process.meet("ended", process.world());
    transport = process.connect("second", seconds(20));
    sum_once(process, transport);
    transport.reset();
  });
}

}  // namespace pacer::testing
