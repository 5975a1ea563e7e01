// Every operation of the Gloo transport against values computed by hand, for every dtype that it promises.
#include <cstdlib>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "scenario.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;
using detail::Transport;
using detail::TransportWorkPtr;

constexpr auto kTimeout = 20000ms;

// Small integers, so that every dtype can hold them and their sums; no two ranks have the same.
at::Tensor values(int rank, int64_t first, int64_t count, at::ScalarType type) {
  return at::arange(first, first + count, at::kLong).remainder(7).add(rank).to(type);
}

void expect_equal(const at::Tensor& found, const at::Tensor& wanted, const char* what, int64_t count) {
  expect(at::equal(found, wanted), what, " of ", count, " ", c10::toString(wanted.scalar_type()),
         " to give other values");
}

void check_sums(Transport& world, int rank, int world_size, int64_t n, at::ScalarType type) {
  at::Tensor sum = at::zeros({n}, type);
  for (int other = 0; other < world_size; ++other) sum.add_(values(other, 0, n, type));
  const at::Tensor tensor = values(rank, 0, n, type);
  world.all_reduce(tensor, kTimeout)->wait();
  expect_equal(tensor, sum, "all_reduce", n);

  const at::Tensor input = values(rank, 0, n * world_size, type);
  const at::Tensor output = at::zeros({n}, type);
  world.reduce_scatter(output, input, kTimeout)->wait();
  at::Tensor chunk = at::zeros({n}, type);
  for (int other = 0; other < world_size; ++other) chunk.add_(values(other, n * rank, n, type));
  expect_equal(output, chunk, "reduce_scatter", n);
}

// Rank r sends count(r, k) elements to rank k.
template <class Count>
void check_all_to_all(Transport& world, int rank, int world_size, at::ScalarType type, const Count& count) {
  std::vector<int64_t> sent, received;
  int64_t total = 0, total_received = 0;
  for (int other = 0; other < world_size; ++other) {
    sent.push_back(count(rank, other));
    received.push_back(count(other, rank));
    total += sent.back();
    total_received += received.back();
  }
  const at::Tensor output = at::zeros({total_received}, type);
  world.all_to_all(output, received, values(rank, 0, total, type), sent, kTimeout)->wait();
  int64_t offset = 0;
  for (int other = 0; other < world_size; ++other) {
    int64_t first = 0;
    for (int before = 0; before < rank; ++before) first += count(other, before);
    const int64_t own = received[static_cast<size_t>(other)];
    expect_equal(output.narrow(0, offset, own), values(other, first, own, type), "all_to_all", own);
    offset += own;
  }
}

void check_moves(Transport& world, int rank, int world_size, int64_t n, at::ScalarType type) {
  at::Tensor all = at::zeros({world_size * n}, type);
  world.all_gather(all, values(rank, 0, n, type), kTimeout)->wait();
  for (int other = 0; other < world_size; ++other) {
    expect_equal(all.narrow(0, other * n, n), values(other, 0, n, type), "all_gather", n);
  }

  // Nothing for some.
  check_all_to_all(world, rank, world_size, type, [=](int from, int to) { return (from + to) % 3 * n; });
  check_all_to_all(world, rank, world_size, type,
                   [=](int from, int to) { return to == (from + world_size - 1) % world_size ? n : 0; });

  for (int root = 0; root < world_size; ++root) {
    const at::Tensor tensor = values(rank, 0, n, type);
    world.broadcast(tensor, root, kTimeout)->wait();
    expect_equal(tensor, values(root, 0, n, type), "broadcast", n);
  }

  // Two messages to the right, at once; they arrive in order.
  const int right = (rank + 1) % world_size, left = (rank + world_size - 1) % world_size;
  const at::Tensor first = at::zeros({n}, type), second = at::zeros({n}, type);
  const TransportWorkPtr work = world.exchange(
      {Message::receive(first, left), Message::receive(second, left),
       Message::send(values(rank, 0, n, type), right), Message::send(values(rank, 3, n, type), right)},
      kTimeout);
  while (!work->is_done()) std::this_thread::sleep_for(1ms);
  work->wait();
  expect_equal(first, values(left, 0, n, type), "receive", n);
  expect_equal(second, values(left, 3, n, type), "receive", n);
}

// Long gathers, which between hosts go to one rank after the other, and short ones behind them, under way at
// once.
void check_gathers_at_once(Transport& world, int rank, int world_size, int64_t n) {
  std::vector<at::Tensor> gathered;
  std::vector<TransportWorkPtr> works;
  for (int i = 0; i < 6; ++i) {
    const int64_t count = i % 2 == 0 ? n : 1;
    gathered.push_back(at::zeros({world_size * count}));
    works.push_back(world.all_gather(gathered.back(), values(rank, i, count, at::kFloat), kTimeout));
  }
  for (size_t i = works.size(); i-- > 0;) works[i]->wait();
  for (int i = 0; i < 6; ++i) {
    const int64_t count = i % 2 == 0 ? n : 1;
    for (int other = 0; other < world_size; ++other) {
      expect_equal(gathered[static_cast<size_t>(i)].narrow(0, other * count, count),
                   values(other, i, count, at::kFloat), "all_gather among others", count);
    }
  }
}

const AddScenario operations("operations", [](const Player& player) {
  const detail::Connection world = player.connect();
  expect(world.data->name() == "Gloo" && world.data->device().is_cpu(), "the data to go over Gloo");
  const std::vector<int64_t> counts =
      player.has("count") ? std::vector<int64_t>{player.number("count")} : std::vector<int64_t>{1, 1000};
  for (Transport* transport : {world.data.get(), world.control.get()}) {
    for (const int64_t n : counts) {
      for (const auto type :
           {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte}) {
        check_sums(*transport, player.rank, player.world_size, n, type);
        check_moves(*transport, player.rank, player.world_size, n, type);
      }
      for (const auto type : {at::kBool, at::kShort, at::kComplexFloat}) {
        check_moves(*transport, player.rank, player.world_size, n, type);
      }
      check_gathers_at_once(*transport, player.rank, player.world_size, n);
    }
  }
  // Shapes other than rows, and parameters.
  const at::Tensor parameter = at::full({3, 4}, player.rank + 1.0).requires_grad_();
  world.data->all_reduce(parameter, kTimeout)->wait();
  const double sum = player.world_size * (player.world_size + 1) / 2.0;
  expect(at::equal(parameter.detach(), at::full({3, 4}, sum)), "the sum of parameters");
});

// reduce_scatter adds in rank order, so that a + b + c is not c + b + a.
const AddScenario rank_order("rank_order", [](const Player& player) {
  const detail::Connection world = player.connect();
  const float terms[] = {1e8F, 1.0F, -1e8F, 1.0F};
  const at::Tensor input = at::full({player.world_size * 3}, terms[player.rank]);
  const at::Tensor output = at::zeros({3});
  world.data->reduce_scatter(output, input, kTimeout)->wait();
  float sum = terms[0];
  for (int rank = 1; rank < player.world_size; ++rank) sum += terms[rank];
  expect(at::equal(output, at::full({3}, sum)), "the sum in rank order");
});

// Several operations under way at once, of both transports, waited for in another order.
const AddScenario at_once("at_once", [](const Player& player) {
  const detail::Connection world = player.connect();
  for (int round = 0; round < 20; ++round) {
    std::vector<at::Tensor> tensors;
    std::vector<TransportWorkPtr> works;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(at::full({1000 * (i + 1)}, player.rank + i));
      works.push_back((i % 2 == 0 ? world.data : world.control)->all_reduce(tensors.back(), kTimeout));
    }
    for (size_t i = works.size(); i-- > 0;) works[i]->wait();
    for (int i = 0; i < 10; ++i) {
      const int sum = player.world_size * (player.world_size - 1) / 2 + player.world_size * i;
      expect(at::equal(tensors[static_cast<size_t>(i)], at::full({1000 * (i + 1)}, sum)), "the sum");
    }
  }
});

// The last operation is done here, and this rank goes at once: the others get all of it all the same.
const AddScenario early_end("early_end", [](const Player& player) {
  for (int round = 0; round < player.number("rounds"); ++round) {
    Player again = player;
    if (again.has("file")) again.arguments["file"] += std::to_string(round);
    const detail::Connection world = again.connect();
    const at::Tensor tensor = at::full({4 << 20}, player.rank == 0 ? 7 : 0, at::kInt);
    if (round % 2 == 1 && player.rank != 0) std::this_thread::sleep_for(20ms);
    world.data->broadcast(tensor, 0, kTimeout)->wait();
    if (round % 3 == 2 && player.rank == 0 && round + 1 == player.number("rounds")) std::_Exit(0);
    expect(at::equal(tensor, at::full({4 << 20}, 7, at::kInt)), "the root's values");
  }
});

}  // namespace
}  // namespace pacer::testing
