// The exchange that the 1-bit optimizers share, over random lists of tensors: the textbook's means and errors
// to the bit whatever the source leaves in the padding; and a sum of more units than partial sums have
// columns.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/kernels/onebit.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_reference.h"
#include "support/samples.h"

namespace pacer::testing::onebit_lists {
namespace {

// The mean of all ranks, padding included.
std::vector<float> mean_of(const detail::OneBitExchange& exchange) {
  std::vector<float> mean(static_cast<size_t>(exchange.layout().length()));
  decode_buffer_cpu(exchange.mean(), 0, exchange.layout().length(), mean.data());
  return mean;
}

struct Case {
  OneBitRules rules;
  CompressionOptions options;
  std::vector<char> is_real;
};

Case random_case(Samples& samples) {
  Case one;
  one.rules.world_size = 1 + samples.below(5);
  one.rules.l1 = samples.chance(0.5);
  one.rules.block_scales = samples.chance(0.5);
  one.rules.alignment = (one.rules.block_scales ? 2048 : 128) * (1 + samples.below(3));
  const int64_t around[] = {0, 1, 127, 128, 129, 2047, 2049};
  one.rules.counts.resize(static_cast<size_t>(1 + samples.below(10)));
  for (int64_t& count : one.rules.counts) {
    count = samples.chance(0.6) ? samples.one_of(around) : samples.below(9000);
  }
  one.options.scale(one.rules.l1 ? ScaleNorm::l1 : ScaleNorm::rms)
      .block_scales(one.rules.block_scales)
      .alignment(one.rules.alignment)
      .compress_alone(true);
  for (const int64_t count : one.rules.counts) {
    one.is_real.insert(one.is_real.end(), static_cast<size_t>(count), 1);
    one.is_real.resize((one.is_real.size() + 127) / 128 * 128, 0);
  }
  return one;
}

}  // namespace

TEST_CASE("P2: lists of tensors give the textbook's mean whatever lies in their padding",
          "[collectives][onebit]") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float garbage[] = {NAN, infinity, -infinity, 1e30F, -1.0F, 0.0F};
  Samples samples(17);
  for (int number = 0; number < 40; ++number) {
    const Case one = random_case(samples);
    const auto ranks = static_cast<size_t>(one.rules.world_size);
    constexpr size_t kCalls = 6;
    std::vector<std::vector<std::vector<float>>> buffers(kCalls);  // [call][rank]
    for (auto& of_call : buffers) {
      of_call.assign(ranks, std::vector<float>(one.is_real.size()));
      for (auto& buffer : of_call) {
        for (size_t i = 0; i < buffer.size(); ++i) {
          buffer[i] = one.is_real[i] ? static_cast<float>(samples.sign() * samples.uniform())
                                     : samples.one_of(garbage);
        }
      }
    }
    OneBitTextbook<float> textbook(one.rules);
    std::vector<std::vector<float>> expected;
    for (const auto& of_call : buffers) expected.push_back(textbook.reduce(of_call));

    const auto world = Communicator::in_process(static_cast<int>(ranks));
    std::vector<std::vector<std::vector<float>>> means(ranks);
    std::vector<at::Tensor> worker_errors(ranks), server_errors(ranks);
    const auto messages = run_ranks(static_cast<int>(ranks), [&](int rank) {
      const auto own = static_cast<size_t>(rank);
      detail::OneBitExchange exchange({world[own], one.options.hierarchical()}, one.rules.counts,
                                      one.options);
      for (size_t call = 0; call < kCalls; ++call) {
        detail::OneBitInput input;
        input.source = [&](int64_t row, int64_t width, float* values) {
          std::copy_n(buffers[call][own].data() + row * kernels::kOneBitRow, width, values);
        };
        exchange.run(input, static_cast<int64_t>(call));
        means[own].push_back(mean_of(exchange));
      }
      worker_errors[own] = exchange.worker_errors();
      server_errors[own] = exchange.server_errors();
    });
    INFO("case " << number << ", " << ranks << " ranks, alignment " << one.rules.alignment);
    REQUIRE(first_of(messages) == "");
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t call = 0; call < kCalls; ++call) {
        // Nobody reads the mean of padding.
        auto& mean = means[rank][call];
        for (size_t i = 0; i < mean.size(); ++i) {
          if (!one.is_real[i]) mean[i] = 0;
        }
        REQUIRE(has_bits_of(tensor_of(mean), expected[call]));
      }
      REQUIRE(worker_errors[rank].numel() == textbook.length());
      REQUIRE(has_bits_of(worker_errors[rank], textbook.worker_errors[rank]));
      const int64_t begin = std::min(textbook.length(), textbook.chunk() * static_cast<int64_t>(rank));
      REQUIRE(server_errors[rank].numel() == std::min(textbook.chunk(), textbook.length() - begin));
      REQUIRE(has_bits_of(server_errors[rank], textbook.server_error, begin));
    }
  }
}

TEST_CASE("the sums of units are added in the specified order", "[collectives][onebit]") {
  // Sums of magnitudes 2^22 (1, 2^-24, 2^-54, 2^-54, ...). From left to right the small ones are lost in
  // 1 + 2^-24, whose mean rounds to 1; added up before they meet it, they tip it over to the next fp32
  // number.
  constexpr int64_t kUnits = 128, kSize = kUnits * 32768;
  std::vector<float> numbers(kSize, 0.0F);
  for (int unit = 0; unit < kUnits; ++unit) {
    numbers[static_cast<size_t>(unit) * 32768] = unit == 0 ? 0x1p22F : unit == 1 ? 0x1p-2F : 0x1p-32F;
  }
  const auto options = CompressionOptions().compress_alone(true).scale(ScaleNorm::l1);
  const auto run = run_onebit(Communicator::in_process(1), kSize, options, 0, 1,
                              [&](int64_t, int64_t) { return numbers; });
  REQUIRE(first_of(run.messages) == "");
  REQUIRE(has_bits_of(run.means[0][0], std::vector<float>(kSize, 1.0F + 0x1p-23F)));
  OneBitTextbook<float> textbook(rules_for(1, kSize, options));
  REQUIRE(has_bits_of(run.means[0][0], textbook.reduce({numbers})));
  REQUIRE(has_bits_of(run.worker_errors[0], textbook.worker_errors[0]));
}

}  // namespace pacer::testing::onebit_lists
