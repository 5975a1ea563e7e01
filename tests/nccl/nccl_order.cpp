// What a stream of its own must not break: the order with the caller's streams, several threads, memory that
// is let go early; deadlines that must not fire; what listens; how fast it is.
#include <dirent.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "nccl/scenarios.h"

namespace pacer::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using TransportPtr = std::shared_ptr<detail::Transport>;

constexpr int64_t kMillisecond = 2'000'000;  // cycles, about

at::TensorOptions floats(const RankProcess& process) {
  return at::TensorOptions(process.device()).dtype(at::kFloat);
}

float sum_of_ranks(const RankProcess& process) {
  return static_cast<float>(process.world() * (process.world() - 1) / 2);
}

void expect_all(const at::Tensor& tensor, float wanted, const std::string& what) {
  expect(tensor.eq(wanted).all().item<bool>(), what + ": not all are " + std::to_string(wanted));
}

// The kernel that produces is slow and enqueued right before, the one that consumes right after wait().
void check_streams(RankProcess& process, const TransportPtr& transport) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, process.device().index()));
  std::vector<at::Tensor> results;
  for (int i = 0; i < 30; ++i) {
    const at::Tensor tensor = at::zeros({100003}, floats(process));
    at::cuda::sleep(2 * kMillisecond);
    tensor.add_(process.rank() + i);
    transport->all_reduce(tensor, seconds(20))->wait();
    results.push_back(tensor * 2);
    tensor.fill_(-1);
  }
  for (int i = 0; i < 30; ++i) {
    expect_all(results[static_cast<size_t>(i)],
               2 * (sum_of_ranks(process) + static_cast<float>(i * process.world())),
               "round " + std::to_string(i));
  }
}

// Threads with streams of their own take turns in starting; everything else they do at the same time.
void check_threads(RankProcess& process, const TransportPtr& transport) {
  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;
  std::string problem;
  const auto work = [&](int thread) {
    try {
      const c10::cuda::CUDAGuard device(process.device());
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, process.device().index()));
      for (int i = thread; i < 400; i += 2) {
        const at::Tensor tensor = at::full({1 + i * 37}, process.rank() + i, floats(process));
        detail::TransportWorkPtr pending;
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [&] { return turn >= i; });
          if (turn > i) return;  // the other thread has failed
          pending = transport->all_reduce(tensor, seconds(20));
          ++turn;
          changed.notify_all();
        }
        pending->wait();
        expect_all(tensor, sum_of_ranks(process) + static_cast<float>(i * process.world()),
                   "operation " + std::to_string(i));
        expect(pending->is_done(), "an operation whose result was read is not done");
      }
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      problem = error.what();
      turn = 1 << 30;
      changed.notify_all();
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  expect(problem.empty(), problem);
}

// The same for several tensors at once, some of which are made by streams' last kernels; and let go early.
void check_coalesced_order(RankProcess& process, const TransportPtr& transport) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, process.device().index()));
  std::vector<at::Tensor> results;
  for (int i = 0; i < 20; ++i) {
    std::vector<at::Tensor> tensors;
    for (const int64_t n : {1, 100003, 77, 1 << 20}) tensors.push_back(at::zeros({n}, floats(process)));
    at::cuda::sleep(2 * kMillisecond);
    for (at::Tensor& tensor : tensors) tensor.add_(process.rank() + i);
    transport->all_reduce_coalesced(tensors, seconds(20))->wait();
    for (at::Tensor& tensor : tensors) {
      results.push_back(tensor * 2);
      tensor.fill_(-1);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const int round = static_cast<int>(i / 4);
    expect_all(results[i], 2 * (sum_of_ranks(process) + static_cast<float>(round * process.world())),
               "round " + std::to_string(round));
  }
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 20; ++i) {
    transport->all_reduce_coalesced(
        {at::ones({1 << 20}, floats(process)), at::ones({1 << 18}, floats(process))}, seconds(20));
    kept.push_back(at::full({1 << 20}, 7, floats(process)));
  }
  for (const at::Tensor& tensor : kept) expect_all(tensor, 7, "memory of a dropped operation");
}

void check_chain(RankProcess& process, const TransportPtr& transport) {
  const int world = process.world();
  const int64_t n = 10007;
  const at::Tensor tensor = at::zeros({n * world}, floats(process));
  const at::Tensor parts = at::empty_like(tensor), sum = at::empty({n}, tensor.options());
  const std::vector<int64_t> counts(static_cast<size_t>(world), n);
  at::cuda::sleep(5 * kMillisecond);
  tensor.add_(process.rank());
  const auto chain = transport->run_on_stream([&] {
    transport->all_to_all(parts, counts, tensor, counts, seconds(20))->wait();
    sum.copy_(parts.view({world, n}).sum(0));
    transport->all_gather(tensor, sum, seconds(20))->wait();
  });
  chain->wait();
  expect_all(tensor * 1, sum_of_ranks(process), "the chain");
  expect(chain->is_done(), "a chain whose result was read is not done");
}

// Works and tensors are dropped at once; new tensors must not get memory that is still being summed.
void check_dropped(RankProcess& process, const TransportPtr& transport) {
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 50; ++i) {
    transport->all_reduce(at::ones({1 << 20}, floats(process)), seconds(20));
    kept.push_back(at::full({1 << 20}, 7, floats(process)));
    if (kept.size() == 8) {
      for (const at::Tensor& tensor : kept) expect_all(tensor, 7, "memory of a dropped operation");
      kept.clear();
    }
  }
  // Waited for on another stream than the one that started it.
  for (int i = 0; i < 20; ++i) {
    const auto work = transport->all_reduce(at::ones({1 << 20}, floats(process)), seconds(20));
    {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, process.device().index()));
      work->wait();
    }
    kept.push_back(at::full({1 << 20}, 7, floats(process)));
  }
  for (const at::Tensor& tensor : kept) expect_all(tensor, 7, "memory of an operation waited for elsewhere");
}

// Three seconds of this rank's own computation before an operation with a deadline of 1.5.
void check_own_computation(RankProcess& process, const TransportPtr& transport) {
  process.meet("own-computation", process.world());
  const at::Tensor tensor = at::ones({1000}, floats(process));
  at::cuda::sleep(3000 * kMillisecond);
  transport->all_reduce(tensor, milliseconds(1500))->wait();
  const Stopwatch watch;
  expect_all(tensor, static_cast<float>(process.world()), "the sum");
  transport->check();
  process.inform("waited " + std::to_string(watch.seconds()) + " s for the computation before the sum");
}

void check_capture(RankProcess& process, const TransportPtr& transport) {
  const at::Tensor tensor = at::ones({10}, floats(process));
  const auto pending = transport->all_reduce(tensor, seconds(20));
  int refused = 0;
  {
    const auto stream = c10::cuda::getStreamFromPool(false, process.device().index());
    const c10::cuda::CUDAStreamGuard guard(stream);
    expect(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "no capture");
    try {
      transport->all_reduce(tensor, seconds(20));
    } catch (const std::exception& error) {
      refused += std::string(error.what()).find("CUDA graph") != std::string::npos;
    }
    try {
      pending->wait();
    } catch (const std::exception& error) {
      refused += std::string(error.what()).find("CUDA graph") != std::string::npos;
    }
    cudaGraph_t graph = nullptr;
    expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the refusals broke the capture");
    cudaGraphDestroy(graph);
  }
  expect(refused == 2, "an operation or a wait was taken into a CUDA graph");
  pending->wait();
  expect_all(tensor, static_cast<float>(process.world()), "the sum");
}

// The inodes of this process's sockets.
std::set<std::string> own_sockets() {
  std::set<std::string> inodes;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[256] = {};
    if (readlink((std::string("/proc/self/fd/") + entry->d_name).c_str(), target, sizeof(target) - 1) < 0)
      continue;
    const std::string text = target;
    if (text.rfind("socket:[", 0) == 0) inodes.insert(text.substr(8, text.size() - 9));
  }
  closedir(folder);
  return inodes;
}

// Addresses as the kernel writes them: hexadecimal, each 32 bits in host order.
bool is_loopback(const std::string& address) {
  if (address.size() == 8) return address.substr(6) == "7F";
  return address == "00000000000000000000000001000000" ||
         (address.substr(0, 24) == "0000000000000000FFFF0000" && address.substr(30) == "7F");
}

void check_listeners(RankProcess& process) {
  const std::set<std::string> own = own_sockets();
  int seen = 0;
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream table(path);
    std::string line;
    for (std::getline(table, line); std::getline(table, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >>
          inode;
      if (own.count(inode) == 0) continue;
      ++seen;
      expect(is_loopback(local.substr(0, local.find(':'))), "a socket at " + local + " in state " + state);
    }
  }
  process.inform(std::to_string(seen) + " TCP sockets, all on loopback");
}

void measure(RankProcess& process, const TransportPtr& transport) {
  const at::Tensor tensor = at::zeros({64}, floats(process));
  c10::cuda::device_synchronize();
  process.meet("measure", process.world());
  constexpr int kCalls = 2000;
  const Stopwatch small;
  for (int i = 0; i < kCalls; ++i) transport->all_reduce(tensor, seconds(20))->wait();
  const double enqueued = small.seconds();
  c10::cuda::device_synchronize();
  const double done = small.seconds();
  char text[200];
  std::snprintf(text, sizeof(text), "all_reduce of 256 bytes: %.1f us of the host, %.1f us in all",
                enqueued / kCalls * 1e6, done / kCalls * 1e6);
  process.inform(text);
  const at::Tensor big = at::zeros({1 << 26}, floats(process));
  transport->all_reduce(big, seconds(20))->wait();
  c10::cuda::device_synchronize();
  const Stopwatch large;
  for (int i = 0; i < 20; ++i) transport->all_reduce(big, seconds(20))->wait();
  c10::cuda::device_synchronize();
  const double bytes = 20.0 * 4 * (1 << 26) * 2 * (process.world() - 1) / process.world();
  // A layer of a transformer: two large matrices and ten vectors.
  std::vector<at::Tensor> layer(10, at::Tensor());
  for (at::Tensor& tensor : layer) tensor = at::zeros({1024}, floats(process));
  for (int i = 0; i < 2; ++i) layer.push_back(at::zeros({4096, 1024}, floats(process)));
  const at::Tensor flat = at::zeros({10 * 1024 + 2 * 4096 * 1024}, floats(process));
  double once[2] = {};
  for (const bool is_flat : {true, false}) {
    const auto sum = [&] {
      (is_flat ? transport->all_reduce(flat, seconds(20))
               : transport->all_reduce_coalesced(layer, seconds(20)))
          ->wait();
    };
    sum();
    c10::cuda::device_synchronize();
    const Stopwatch watch;
    for (int i = 0; i < 50; ++i) sum();
    c10::cuda::device_synchronize();
    once[is_flat ? 0 : 1] = watch.seconds() / 50 * 1e6;
  }
  std::snprintf(text, sizeof(text), "12 tensors of 32 MiB: %.0f us flat, %.0f us as they are", once[0],
                once[1]);
  process.inform(text);
  std::snprintf(text, sizeof(text), "all_reduce of 256 MiB: %.0f GB/s sent by each rank",
                bytes / large.seconds() / 1e9);
  process.inform(text);
}

}  // namespace

void check_order(RankProcess& process, const TransportPtr& transport) {
  process.check("operations follow the producer and precede the consumer",
                [&] { check_streams(process, transport); });
  process.check("sums of several tensors follow the producer and precede the consumer",
                [&] { check_coalesced_order(process, transport); });
  process.check("two threads", [&] { check_threads(process, transport); });
  process.check("a chain on the transport's stream", [&] { check_chain(process, transport); });
  process.check("dropped operations keep their memory", [&] { check_dropped(process, transport); });
  process.check("a long computation before is not held against an operation",
                [&] { check_own_computation(process, transport); });
  process.check("CUDA graphs are refused", [&] { check_capture(process, transport); });
  process.check("sockets are on loopback only", [&] { check_listeners(process); });
  process.check("2000 small operations", [&] { measure(process, transport); });
}

void run_healthy(RankProcess& process) {
  const c10::cuda::CUDAGuard guard(process.device());
  std::shared_ptr<detail::Transport> transport;
  process.check("set-up", [&] {
    const Stopwatch watch;
    transport = process.connect("healthy", seconds(30));
    process.inform(transport->name() + " set up in " + std::to_string(watch.seconds()) + " s");
    expect(transport->device() == process.device() && transport->has_stream(), "another device");
  });
  if (!transport) return;
  check_results(process, transport);
  check_order(process, transport);
  process.check("the end", [&] {
    transport->check();
    const Stopwatch watch;
    transport.reset();
    process.inform("ended in " + std::to_string(watch.seconds()) + " s");
    expect(watch.seconds() < 2, "the end was an abort");
  });
}

void run_again(RankProcess& process) {
  process.check("the same GPUs in new processes", [&] {
    const c10::cuda::CUDAGuard guard(process.device());
    const auto transport = process.connect("again", seconds(30));
    const at::Tensor tensor = at::ones({1000}, floats(process));
    transport->all_reduce(tensor, seconds(20))->wait();
    expect_all(tensor, static_cast<float>(process.world()), "the sum");
  });
}

}  // namespace pacer::testing
