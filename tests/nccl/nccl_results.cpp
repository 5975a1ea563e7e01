// Every operation against values computed on the CPU. The values are small whole numbers, so that sums are
// exact in every dtype.
#include <ATen/ATen.h>

#include "nccl/scenarios.h"

namespace pacer::testing {
namespace {

using std::chrono::seconds;

// Element i of rank r, on the CPU, in int64.
at::Tensor values_of(int rank, int64_t n, int64_t seed = 0) {
  return (at::arange(n, at::kLong) * 7 + rank * 13 + seed).remainder(5);
}

at::Tensor input_of(const RankProcess& process, int64_t n, at::ScalarType type, int64_t seed = 0) {
  return values_of(process.rank(), n, seed).to(type).to(process.device());
}

at::Tensor sum_of_all(const RankProcess& process, int64_t n, int64_t seed = 0) {
  at::Tensor sum = at::zeros({n}, at::kLong);
  for (int rank = 0; rank < process.world(); ++rank) sum += values_of(rank, n, seed);
  return sum;
}

void expect_equal(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
  const at::Tensor on_host = found.cpu();
  const at::Tensor expected = wanted.to(on_host.scalar_type());
  if (at::equal(on_host, expected)) return;
  const int64_t at = on_host.ne(expected).nonzero()[0].item<int64_t>();
  throw std::runtime_error(what + ": element " + std::to_string(at) + " is " +
                           std::to_string(on_host[at].item<double>()) + ", not " +
                           std::to_string(expected[at].item<double>()));
}

std::string text_of(at::ScalarType type, int64_t n) {
  return std::string(c10::toString(type)) + " of " + std::to_string(n);
}

const at::ScalarType kSums[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                at::kLong,   at::kInt,   at::kByte,     at::kChar};
const at::ScalarType kMoved[] = {at::kFloat, at::kBFloat16, at::kByte, at::kBool, at::kLong};

}  // namespace

void check_results(RankProcess& process, const std::shared_ptr<detail::Transport>& transport) {
  const int world = process.world(), rank = process.rank();
  process.check("all_reduce", [&] {
    for (const at::ScalarType type : kSums) {
      for (const int64_t n : {1, 3, 1000, 65537, 1048577}) {
        const at::Tensor tensor = input_of(process, n, type);
        transport->all_reduce(tensor, seconds(20))->wait();
        expect_equal(tensor, sum_of_all(process, n), text_of(type, n));
      }
    }
  });
  process.check("all_reduce of several tensors, of any dtypes and sizes", [&] {
    expect(transport->coalesces(), "NCCL does not group sums");
    for (int64_t seed = 0; seed < 3; ++seed) {
      std::vector<at::Tensor> tensors;
      for (const at::ScalarType type : kSums) {
        for (const int64_t n : {1, 1000, 3, 1048577, 70000}) {
          tensors.push_back(input_of(process, n, type, seed));
        }
      }
      transport->all_reduce_coalesced(tensors, seconds(20))->wait();
      for (const at::Tensor& tensor : tensors) {
        expect_equal(tensor, sum_of_all(process, tensor.numel(), seed),
                     text_of(tensor.scalar_type(), tensor.numel()));
      }
    }
    // Hundreds of small ones, as the biases of a deep model.
    std::vector<at::Tensor> many;
    for (int64_t i = 0; i < 500; ++i) many.push_back(input_of(process, 1 + i % 97, at::kFloat, i));
    transport->all_reduce_coalesced(many, seconds(20))->wait();
    for (int64_t i = 0; i < 500; ++i) {
      expect_equal(many[static_cast<size_t>(i)], sum_of_all(process, 1 + i % 97, i), std::to_string(i));
    }
  });
  process.check("reduce_scatter", [&] {
    for (const at::ScalarType type : kSums) {
      for (const int64_t n : {1, 7, 4099}) {
        const at::Tensor input = input_of(process, n * world, type);
        const at::Tensor output = at::empty({n}, input.options());
        transport->reduce_scatter(output, input, seconds(20))->wait();
        expect_equal(output, sum_of_all(process, n * world).narrow(0, rank * n, n), text_of(type, n));
      }
    }
  });
  process.check("all_gather", [&] {
    for (const at::ScalarType type : kMoved) {
      for (const int64_t n : {1, 5, 4097}) {
        const at::Tensor input = input_of(process, n, type);
        const at::Tensor output = at::empty({n * world}, input.options());
        transport->all_gather(output, input, seconds(20))->wait();
        for (int r = 0; r < world; ++r) {
          expect_equal(output.narrow(0, r * n, n), values_of(r, n), text_of(type, n));
        }
      }
    }
  });
  process.check("all_to_all", [&] {
    for (const at::ScalarType type : kMoved) {
      for (const int64_t n : {1, 3, 5001}) {
        const std::vector<int64_t> counts(static_cast<size_t>(world), n);
        const at::Tensor input = input_of(process, n * world, type);
        const at::Tensor output = at::empty_like(input);
        transport->all_to_all(output, counts, input, counts, seconds(20))->wait();
        for (int r = 0; r < world; ++r) {
          expect_equal(output.narrow(0, r * n, n), values_of(r, n * world).narrow(0, rank * n, n),
                       text_of(type, n));
        }
      }
    }
  });
  process.check("all_to_all with uneven counts, some of them 0", [&] {
    const auto count = [](int from, int to, int64_t round) { return (from * 3 + to * 5 + round) % 4 * 1001; };
    for (int64_t round = 0; round < 4; ++round) {
      std::vector<int64_t> sent, received;
      int64_t all_sent = 0, all_received = 0;
      for (int r = 0; r < world; ++r) {
        sent.push_back(count(rank, r, round));
        received.push_back(count(r, rank, round));
        all_sent += sent.back();
        all_received += received.back();
      }
      const at::Tensor input = input_of(process, all_sent, at::kByte, round);
      const at::Tensor output = at::full({all_received}, 99, input.options());
      transport->all_to_all(output, received, input, sent, seconds(20))->wait();
      int64_t at = 0;
      for (int r = 0; r < world; ++r) {
        int64_t before = 0, all_of_r = 0;
        for (int to = 0; to < world; ++to) {
          if (to < rank) before += count(r, to, round);
          all_of_r += count(r, to, round);
        }
        const int64_t n = count(r, rank, round);
        expect_equal(output.narrow(0, at, n), values_of(r, all_of_r, round).narrow(0, before, n),
                     "from rank " + std::to_string(r));
        at += n;
      }
    }
  });
  process.check("broadcast", [&] {
    for (int root = 0; root < world; ++root) {
      for (const at::ScalarType type : kMoved) {
        const at::Tensor tensor = input_of(process, 3001, type);
        transport->broadcast(tensor, root, seconds(20))->wait();
        expect_equal(tensor, values_of(root, 3001), text_of(type, 3001));
      }
    }
  });
  process.check("a ring of sends and receives in groups", [&] {
    const int next = (rank + 1) % world, previous = (rank + world - 1) % world;
    at::Tensor current = input_of(process, 4099, at::kFloat);
    for (int step = 1; step <= world; ++step) {
      const at::Tensor received = at::empty_like(current);
      transport->exchange({Message::receive(received, previous), Message::send(current, next)}, seconds(20))
          ->wait();
      current = received;
      const int origin = (rank - step % world + world) % world;
      expect_equal(current, values_of(origin, 4099), "step " + std::to_string(step));
    }
  });
  process.check("a single send", [&] {
    const at::Tensor tensor = input_of(process, 77, at::kHalf);
    if (world == 1) return;
    if (rank == 0) transport->exchange({Message::send(tensor, 1)}, seconds(20))->wait();
    if (rank == 1) {
      transport->exchange({Message::receive(tensor, 0)}, seconds(20))->wait();
      expect_equal(tensor, values_of(0, 77), "what came");
    }
    process.meet("single-send", world);
  });
  process.check("more than 2^31 elements", [&] {
    const int64_t n = (int64_t{1} << 31) + 3;
    const at::Tensor tensor = at::full({n}, rank, at::TensorOptions(process.device()).dtype(at::kByte));
    const int root = world - 1;
    transport->broadcast(tensor, root, seconds(20))->wait();
    expect(tensor[0].item<int>() == root && tensor[n - 1].item<int>() == root, "a broadcast stopped short");
    transport->all_reduce(tensor, seconds(20))->wait();
    expect(tensor[0].item<int>() == root * world && tensor[n - 1].item<int>() == root * world,
           "a sum stopped short");
  });
  process.check("dtypes that cannot be added are refused, and nothing is lost", [&] {
    bool refused = false;
    try {
      transport->all_reduce(at::ones({4}, at::TensorOptions(process.device()).dtype(at::kBool)), seconds(20));
    } catch (const std::exception&) {
      refused = true;
    }
    expect(refused, "a sum of bool was accepted");
    refused = false;
    try {
      const auto options = at::TensorOptions(process.device());
      transport->all_reduce_coalesced({at::ones({4}, options), at::ones({4}, options.dtype(at::kBool))},
                                      seconds(20));
    } catch (const std::exception&) {
      refused = true;
    }
    expect(refused, "a sum of bool among others was accepted");
    const at::Tensor tensor = input_of(process, 10, at::kFloat);
    transport->all_reduce(tensor, seconds(20))->wait();
    expect_equal(tensor, sum_of_all(process, 10), "the sum after it");
  });
}

}  // namespace pacer::testing
