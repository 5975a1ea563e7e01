// What a CompressedAllReduce refuses, what it does where ranks differ, bring numbers that are not finite, or
// leave, and how it goes on afterwards; and the floating-point mode of its caller.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/core/error.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_reference.h"
#include "support/optimizers/optimizers.h"
#include "support/samples.h"

namespace pacer::testing::compressed_mean_errors {
namespace {

using namespace std::chrono_literals;

// What an action throws: "" for nothing, or the most special type and the message.
template <class Action>
std::string thrown_by(const Action& action) {
  try {
    action();
  } catch (const CommunicationError& error) {
    return std::string("CommunicationError: ") + error.what();
  } catch (const InvalidArgument& error) {
    return std::string("InvalidArgument: ") + error.what();
  } catch (const Error& error) {
    return std::string("Error: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("something else: ") + error.what();
  }
  return "";
}

bool begins_with(const std::string& text, const std::string& part) {
  return text.compare(0, part.size(), part) == 0;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("a buffer that does not fit is refused and nothing has happened", "[collectives][onebit]") {
  constexpr int64_t kSize = 200;
  const auto inputs = random_inputs(3, kSize);
  const auto world = Communicator::in_process(2);
  const auto untouched = run_onebit(world, kSize, {}, 0, 6, inputs);
  REQUIRE(first_of(untouched.messages) == "");

  std::vector<std::string> wrong(2);
  const auto disturbed = [&](CompressedAllReduce& mean, size_t rank) {
    mean.reduce(tensor_of(inputs(static_cast<int64_t>(rank), 0)));
    const at::Tensor worker = mean.worker_error(), server = mean.server_error();
    const int64_t sent = mean.bytes_sent(), all_sent = world[rank]->bytes_sent();
    const auto floats = [](int64_t count) { return at::zeros({count}, at::kFloat); };
    const std::vector<at::Tensor> buffers = {
        at::Tensor(),
        floats(kSize - 1),
        floats(kSize + 1),
        floats(256),  // the padded size
        floats(0),
        at::zeros({kSize}, at::kDouble),
        at::zeros({kSize}, at::kHalf),
        at::zeros({kSize}, at::kInt),
        floats(2 * kSize).slice(0, 0, 2 * kSize, 2),
        floats(kSize).view({2, kSize / 2}).t(),
        at::empty({kSize}, at::TensorOptions().device(at::kMeta).dtype(at::kFloat)),
    };
    for (const at::Tensor& buffer : buffers) {
      if (!begins_with(thrown_by([&] { mean.reduce(buffer); }), "InvalidArgument")) wrong[rank] += "reduce ";
    }
    const std::vector<std::pair<at::Tensor, at::Tensor>> errors = {
        {at::Tensor(), server},
        {worker, at::Tensor()},
        {floats(kSize + 1), server},
        {floats(256), server},
        {worker.to(at::kDouble), server},
        {floats(kSize), floats(server.numel() + 1)},
        {floats(kSize), server.to(at::kDouble)},
    };
    for (const auto& [own, serving] : errors) {
      if (!begins_with(thrown_by([&, &o = own, &s = serving] { mean.set_errors(o, s); }), "InvalidArgument"))
        wrong[rank] += "set_errors ";
    }
    if (!same_bits(mean.worker_error(), worker) || !same_bits(mean.server_error(), server) ||
        mean.bytes_sent() != sent || world[rank]->bytes_sent() != all_sent) {
      wrong[rank] += "state ";
    }
  };
  const auto run = run_onebit(world, kSize, {}, 1, 6, inputs, disturbed);
  CHECK(first_of(run.messages) == "");
  CHECK(wrong == std::vector<std::string>(2));
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t call = 0; call < 5; ++call) {
      CHECK(same_bits(run.means[rank][call], untouched.means[rank][call + 1]));
    }
  }
}

TEST_CASE("a matrix in one piece is reduced like a vector", "[collectives][onebit]") {
  const auto world = Communicator::in_process(1);
  CompressedAllReduce mean(world[0], 6, CompressionOptions().compress_alone(true));
  const at::Tensor matrix = tensor_of({3, -3, 3, 3, -3, 3}).view({2, 3});
  mean.reduce(matrix);
  CHECK(has_bits_of(matrix, {3, -3, 3, 3, -3, 3}));
}

TEST_CASE("what a compressed mean cannot be made of is refused", "[collectives][onebit]") {
  const auto world = Communicator::in_process(1)[0];
  const auto make = [&](int64_t size, const CompressionOptions& options = {}) {
    return [=] { CompressedAllReduce(world, size, options); };
  };
  CHECK(contains(refusal([] { CompressedAllReduce(nullptr, 3); }), "needs a Communicator"));
  CHECK(contains(refusal([] { CompressedAllReduce(nullptr, 3, CompressionOptions().compress_alone(true)); }),
                 "needs a Communicator"));
  CHECK(contains(refusal(make(-1)), "-1"));
  CHECK(contains(refusal(make(std::numeric_limits<int64_t>::min())), "size >= 0"));
  for (const int64_t alignment : {-2048, -128, -1, 0, 1, 64, 100, 127, 129, 2047}) {
    CHECK(contains(refusal(make(3, CompressionOptions().alignment(alignment))), "multiple of 128"));
  }
  for (const int64_t alignment : {-2048, 1, 128, 1024, 2049, 3072}) {
    CHECK(contains(refusal(make(3, CompressionOptions().alignment(alignment).block_scales(true))),
                   "multiple of 2048"));
  }
}

TEST_CASE("F4: ranks that compress something else all learn what differs", "[collectives][onebit]") {
  struct Case {
    int64_t size;
    CompressionOptions options;
    std::string text;
  };
  const CompressionOptions usual;
  const std::vector<Case> cases = {
      {1001, usual, "sizes of the compressed tensors"},
      {0, usual, "sizes of the compressed tensors"},
      {1000, CompressionOptions().scale(ScaleNorm::l1), "l1 scales"},
      {1000, CompressionOptions().block_scales(true), "by blocks"},
      {1000, CompressionOptions().alignment(256), "alignment 256"},
  };
  for (const Case& one : cases) {
    for (const int odd : {0, 2}) {
      const auto world = Communicator::in_process(3);
      const auto messages = run_ranks(3, [&](int rank) {
        const auto own = static_cast<size_t>(rank);
        CompressedAllReduce mean(world[own], rank == odd ? one.size : 1000,
                                 rank == odd ? one.options : usual);
      });
      for (const std::string& message : messages) CHECK(contains(message, one.text));
      for (const auto& rank : world) {
        for (const Traffic& entry : rank->traffic()) CHECK(entry.operation == "agreement");
      }
    }
  }
  // The least alignment is 128, said or not.
  const auto world = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    CompressionOptions options;
    if (rank == 1) options.alignment(128);
    CompressedAllReduce(world[static_cast<size_t>(rank)], 1000, options);
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("ranks that are not at the same call are told so", "[collectives][onebit]") {
  const auto world = Communicator::in_process(2);
  std::vector<std::string> messages(2);
  const auto failures = run_ranks(2, [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    CompressedAllReduce used(world[own], 300), fresh(world[own], 300);
    used.reduce(at::zeros({300}));
    messages[own] = thrown_by([&] { (rank == 0 ? used : fresh).reduce(at::zeros({300})); });
  });
  REQUIRE(first_of(failures) == "");
  for (const std::string& message : messages) {
    CHECK(begins_with(message, "Error: "));
    CHECK(contains(message, "all ranks must take the same steps"));
  }
}

TEST_CASE("ranks at the same step that have not exchanged as often are told so", "[collectives][onebit]") {
  detail::OneBitInput zeros;
  zeros.source = [](int64_t, int64_t width, float* row) { std::fill_n(row, width, 0.0f); };
  const auto messages = run_ranks(2, [&, world = Communicator::in_process(2)](int rank) {
    const detail::OneBitRoute route(world[static_cast<size_t>(rank)], /*hierarchical=*/false);
    detail::OneBitExchange used(route, {300}, {}), fresh(route, {300}, {});
    used.run(zeros, /*step=*/7);
    (rank == 0 ? used : fresh).run(zeros, /*step=*/7);
  });
  for (const auto& message : messages) CHECK(contains(message, "all ranks must take the same steps"));
}

TEST_CASE("N2: a number that is not finite is an error on every rank, until errors are set anew",
          "[collectives][onebit]") {
  constexpr int64_t kSize = 5000;
  const auto inputs = random_inputs(3, kSize);
  for (const auto norm : {ScaleNorm::rms, ScaleNorm::l1}) {
    for (const bool blocks : {false, true}) {
      for (const int64_t place : {int64_t{0}, int64_t{2500}, kSize - 1}) {
        for (const float bad : {NAN, kInfinity, -kInfinity, 1e25F}) {
          if (bad == 1e25F && norm == ScaleNorm::l1) continue;  // its square is infinite, it is not
          for (const int odd : {0, 2}) {
            const auto options = CompressionOptions().scale(norm).block_scales(blocks);
            const auto world = Communicator::in_process(3);
            std::vector<std::string> first(3), second(3);
            std::vector<at::Tensor> means(3), expected(3);
            const auto messages = run_ranks(3, [&](int rank) {
              const auto own = static_cast<size_t>(rank);
              CompressedAllReduce mean(world[own], kSize, options), other(world[own], kSize, options);
              mean.reduce(tensor_of(inputs(rank, 0)));
              auto values = inputs(rank, 1);
              if (rank == odd) values[static_cast<size_t>(place)] = bad;
              first[own] = thrown_by([&] { mean.reduce(tensor_of(values)); });
              second[own] = thrown_by([&] { mean.reduce(tensor_of(inputs(rank, 2))); });
              second[own] += thrown_by([&] { mean.reduce(tensor_of(inputs(rank, 2))); });
              mean.set_errors(other.worker_error(), other.server_error());
              mean.reduce(means[own] = tensor_of(inputs(rank, 3)));
              other.reduce(expected[own] = tensor_of(inputs(rank, 3)));
            });
            INFO("rank " << odd << " brings " << bad << " at " << place << ", blocks " << blocks);
            REQUIRE(first_of(messages) == "");
            for (size_t rank = 0; rank < 3; ++rank) {
              REQUIRE(begins_with(first[rank], "Error: "));
              REQUIRE(contains(first[rank], "not finite"));
              REQUIRE(begins_with(second[rank], "Error: "));
              REQUIRE(contains(second[rank].substr(1), "Error: "));
              REQUIRE(same_bits(means[rank], expected[rank]));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("where a rank leaves, the others fail and go on only with a new world", "[collectives][onebit]") {
  const auto world = Communicator::in_process(3, CommunicatorOptions().timeout(20s));
  const auto inputs = random_inputs(3, 700);
  std::vector<std::string> failed(3), refused(3), again(3);
  const auto messages = run_ranks(3, [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    CompressedAllReduce mean(world[own], 700);
    for (int64_t call = 0; call < 5; ++call) mean.reduce(tensor_of(inputs(rank, call)));
    if (rank == 1) return world[1]->leave("its data ended");
    failed[own] = thrown_by([&] { mean.reduce(tensor_of(inputs(rank, 5))); });
    refused[own] = thrown_by([&] { mean.reduce(tensor_of(inputs(rank, 6))); });
    mean.set_errors(at::zeros({700}), at::zeros({mean.served().end - mean.served().begin}));
    again[own] = thrown_by([&] { mean.reduce(tensor_of(inputs(rank, 7))); });
  });
  CHECK(first_of(messages) == "");
  for (const size_t rank : {0, 2}) {
    CHECK(begins_with(failed[rank], "CommunicationError: "));
    CHECK(contains(failed[rank], "rank 1 left: its data ended"));
    CHECK(begins_with(refused[rank], "Error: "));
    CHECK(contains(refused[rank], "failed half-way"));
    CHECK(contains(refused[rank], "rank 1 left"));
    CHECK(begins_with(again[rank], "CommunicationError: "));
  }
}

#if defined(__SSE2__)
TEST_CASE("a program that flushes denormals to zero gets the same mean and errors", "[collectives][onebit]") {
  // Built from bits: arithmetic of the threads below would flush them.
  const auto tiny = [](int64_t rank, int64_t call) {
    Samples samples(static_cast<uint64_t>(2 * call + rank));
    std::vector<float> values(300);
    for (float& value : values) {
      value = kernels::float_of(static_cast<uint32_t>(samples.bits()) & 0x807FFFFFu);
    }
    return values;
  };
  for (const auto norm : {ScaleNorm::rms, ScaleNorm::l1}) {
    const auto options = CompressionOptions().scale(norm);
    const auto world = Communicator::in_process(2);
    const auto usual = run_onebit(world, 300, options, 0, 5, tiny);
    const auto flushed = run_onebit(world, 300, options, 0, 5, tiny, [](CompressedAllReduce&, size_t) {
      _mm_setcsr(_mm_getcsr() | 0x8040);  // until this rank's thread ends
    });
    INFO((norm == ScaleNorm::rms ? "rms" : "l1"));
    REQUIRE(first_of(usual.messages) + first_of(flushed.messages) == "");
    CHECK(same_bits(flushed.means[0], usual.means[0]));
    CHECK(same_bits(flushed.worker_errors, usual.worker_errors));
    CHECK(same_bits(flushed.server_errors, usual.server_errors));
  }
}
#endif

}  // namespace pacer::testing::compressed_mean_errors
