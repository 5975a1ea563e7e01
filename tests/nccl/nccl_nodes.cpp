// Four ranks that NCCL takes for two hosts of two GPUs: what goes on inside a host takes its own way.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "nccl/scenarios.h"

namespace pacer::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using TransportPtr = std::shared_ptr<detail::Transport>;

int mate_of(int rank) { return rank ^ 1; }

std::vector<int64_t> counts_of(const RankProcess& process, int64_t own, int64_t mate) {
  std::vector<int64_t> counts(static_cast<size_t>(process.world()), 0);
  counts[static_cast<size_t>(process.rank())] = own;
  counts[static_cast<size_t>(mate_of(process.rank()))] = mate;
  return counts;
}

// Bytes that tell who sent them, and where they were.
at::Tensor bytes_of(const RankProcess& process, int rank, int64_t n) {
  return (at::arange(n, at::TensorOptions(process.device()).dtype(at::kLong)) * 5 + rank * 31)
      .remainder(251)
      .to(at::kByte);
}

// Each rank keeps `own` bytes and sends its mate as many as its number says.
void check_exchange(const RankProcess& process, const TransportPtr& transport, int64_t own) {
  const int rank = process.rank(), mate = mate_of(rank);
  const auto sent_by = [](int r) { return int64_t{100003} * (r % 3); };  // rank 0 and 3: nothing
  const at::Tensor input = bytes_of(process, rank, own + sent_by(rank));
  const at::Tensor output = at::full({own + sent_by(mate)}, 255, input.options());
  transport
      ->all_to_all_in_node(output, counts_of(process, own, sent_by(mate)), input,
                           counts_of(process, own, sent_by(rank)), seconds(20))
      ->wait();
  // Parts lie in the order of the ranks they go to or come from.
  const bool is_first = rank < mate;
  expect(at::equal(output.narrow(0, is_first ? 0 : sent_by(mate), own),
                   input.narrow(0, is_first ? 0 : sent_by(rank), own)),
         "what it keeps has changed");
  const at::Tensor all_of_mate = bytes_of(process, mate, own + sent_by(mate));
  expect(at::equal(output.narrow(0, is_first ? own : 0, sent_by(mate)),
                   all_of_mate.narrow(0, is_first ? 0 : own, sent_by(mate))),
         "what came from the mate is wrong");
}

double gigabytes_a_second(const RankProcess& process, const TransportPtr& transport, bool in_node) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  constexpr int kCalls = 10;
  const at::Tensor input = at::zeros({kBytes}, at::TensorOptions(process.device()).dtype(at::kByte));
  const at::Tensor output = at::empty_like(input);
  const auto counts = counts_of(process, 0, kBytes);
  const auto exchange = [&] {
    (in_node ? transport->all_to_all_in_node(output, counts, input, counts, seconds(20))
             : transport->all_to_all(output, counts, input, counts, seconds(20)))
        ->wait();
  };
  exchange();
  c10::cuda::device_synchronize();
  const Stopwatch watch;
  for (int i = 0; i < kCalls; ++i) exchange();
  c10::cuda::device_synchronize();
  return static_cast<double>(kBytes) * kCalls / watch.seconds() / 1e9;
}

// Calls `start` until it throws, or what it started keeps check() from passing.
bool fails_within(const TransportPtr& transport, double limit,
                  const std::function<detail::TransportWorkPtr()>& start) {
  const Stopwatch watch;
  try {
    auto work = start();
    while (watch.seconds() < limit) {
      transport->check();
      if (work->is_done()) work = start();
      std::this_thread::sleep_for(milliseconds(10));
    }
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

}  // namespace

void run_nodes(RankProcess& process) {
  setenv("NCCL_HOSTID", process.rank() < 2 ? "node-0" : "node-1", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  const c10::cuda::CUDAGuard guard(process.device());
  auto transport = process.connect("nodes", seconds(30));
  process.check("exchanges inside nodes", [&] {
    for (const int64_t own : {1, 3, 70001}) check_exchange(process, transport, own);
  });
  process.check("between them, the world's operations", [&] {
    const at::Tensor one = at::ones({1000}, at::TensorOptions(process.device()));
    for (int i = 0; i < 20; ++i) {
      transport->all_reduce(one, seconds(20))->wait();
      check_exchange(process, transport, 1 + 1000 * i);
      expect(one.eq(process.world()).all().item<bool>(), "a wrong sum");
      one.fill_(1);
    }
  });
  const double inside = gigabytes_a_second(process, transport, true);
  const double among_all = gigabytes_a_second(process, transport, false);
  char text[120];
  std::snprintf(text, sizeof text, "to the mate: %.0f GB/s inside the node, %.0f among all ranks", inside,
                among_all);
  process.inform(text);

  process.meet("ready", process.world());
  if (process.is_last()) raise(SIGSTOP);
  const at::Tensor input = at::ones({100000}, at::TensorOptions(process.device()));
  const at::Tensor output = at::empty_like(input);
  const auto counts = counts_of(process, 0, input.numel());
  const auto exchange = [&] {
    return transport->all_to_all_in_node(output, counts, input, counts, seconds(2));
  };
  const bool lost_its_mate = mate_of(process.rank()) + 1 == process.world();
  process.check("a node without losses goes on", [&] {
    if (lost_its_mate) return;
    exchange()->wait();
    c10::cuda::device_synchronize();
    expect(at::equal(output, input), "it has other values");
  });
  process.check("a stopped rank is noticed", [&] {
    const auto sum = [&] { return transport->all_reduce(input, seconds(2)); };
    expect(lost_its_mate ? fails_within(transport, 12, exchange) : fails_within(transport, 12, sum),
           "an operation without all ranks did not fail");
    const Stopwatch watch;
    transport->abort();
    transport.reset();
    expect(watch.seconds() < 11, "the end took " + std::to_string(watch.seconds()) + " s");
    // The GPU is free again.
    expect(at::ones({10}, at::TensorOptions(process.device())).sum().item<float>() == 10, "CUDA is broken");
  });
}

}  // namespace pacer::testing
