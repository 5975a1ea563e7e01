// Properties of the compressed mean over long runs and whole ranges of sizes: nothing is lost for good (the
// sum of results is the sum of means, up to what the errors hold), scales count real elements only, the
// textbook in fp64 agrees, and nothing depends on threads or chance.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/kernels/onebit_reference.h"
#include "support/optimizers/optimizers.h"
#include "support/samples.h"

namespace pacer::testing::compressed_mean_properties {
namespace {

struct Adversary {
  std::string name;
  // Element i of what a rank brings to a call.
  std::function<double(Samples&, int64_t rank, int64_t call, int64_t i)> number;
};

const std::vector<Adversary>& adversaries() {
  static const std::vector<Adversary> all = {
      {"random", [](Samples& s, int64_t, int64_t, int64_t) { return s.sign() * s.uniform(); }},
      {"constant",
       [](Samples&, int64_t rank, int64_t, int64_t) { return 0.3 + 0.1 * static_cast<double>(rank); }},
      {"a constant by element",
       [](Samples&, int64_t, int64_t, int64_t i) { return std::sin(static_cast<double>(i * i)); }},
      {"huge and tiny",
       [](Samples& s, int64_t, int64_t, int64_t i) {
         return s.sign() * s.uniform() * (i % 50 == 0 ? 1e12 : i % 3 == 0 ? 1e-12 : 1.0);
       }},
      {"one spike", [](Samples&, int64_t, int64_t, int64_t i) { return i == 7 ? 1.0 : 0.0; }},
      {"alternating",
       [](Samples&, int64_t, int64_t call, int64_t i) { return (call + i) % 2 == 0 ? 0.7 : -0.7; }},
      {"ranks that cancel", [](Samples&, int64_t rank, int64_t,
                               int64_t i) { return (rank % 2 == 0 ? 1.0 : -1.0) * (1.0 + i % 5); }},
      {"growing", [](Samples& s, int64_t, int64_t call,
                     int64_t) { return s.sign() * std::exp2(static_cast<double>(call) / 20); }},
      {"zeros of both signs",
       [](Samples& s, int64_t, int64_t, int64_t) { return s.chance(0.5) ? 0.0 : -0.0; }},
  };
  return all;
}

OneBitInputs inputs_of(const Adversary& adversary, int64_t size) {
  return [=](int64_t rank, int64_t call) {
    Samples samples(static_cast<uint64_t>(call * 64 + rank));
    std::vector<float> values(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      values[static_cast<size_t>(i)] = static_cast<float>(adversary.number(samples, rank, call, i));
    }
    return values;
  };
}

template <class Number>
double norm_of(const std::vector<Number>& values) {
  double sum = 0;
  for (const Number value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

template <class Values>
void add(std::vector<double>& sum, const Values& values, double factor, size_t begin = 0) {
  for (size_t i = 0; i < values.size(); ++i) sum[begin + i] += factor * static_cast<double>(values[i]);
}

std::vector<float> floats_of(const at::Tensor& tensor) {
  const float* data = tensor.const_data_ptr<float>();
  return {data, data + tensor.numel()};
}

// All sizes on demand; else those around multiples of 128 and some in between, others for each world size.
std::vector<int64_t> sizes_for(int64_t world_size) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size <= 1025; ++size) {
    const bool is_near = (size + 1) % 128 <= 2;
    if (wants_long_tests() || is_near || (size + world_size) % 16 == 0) sizes.push_back(size);
  }
  return sizes;
}

// |sum of results + mean worker error + server error - sum of means|, and the sum over calls of the mean norm
// of what the ranks brought.
struct Drift {
  double lost = HUGE_VAL, norms = 0;
};

Drift drift_of(int64_t world_size, int64_t size, const CompressionOptions& options, int64_t calls,
               const OneBitInputs& made) {
  // [rank][call]: made once, for the calls and for their sum.
  std::vector<std::vector<std::vector<float>>> brought(static_cast<size_t>(world_size));
  for (int64_t rank = 0; rank < world_size; ++rank) {
    for (int64_t call = 0; call < calls; ++call)
      brought[static_cast<size_t>(rank)].push_back(made(rank, call));
  }
  const OneBitInputs inputs = [&](int64_t rank, int64_t call) {
    return brought[static_cast<size_t>(rank)][static_cast<size_t>(call)];
  };
  const auto run =
      run_onebit(Communicator::in_process(static_cast<int>(world_size)), size, options, 0, calls, inputs);
  if (!first_of(run.messages).empty()) return {};
  Drift drift;
  std::vector<double> rest(static_cast<size_t>(size), 0.0);
  const double share = 1.0 / static_cast<double>(world_size);
  for (const at::Tensor& mean : run.means[0]) add(rest, floats_of(mean), 1);
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const auto own = static_cast<size_t>(rank);
    add(rest, floats_of(run.worker_errors[own]), share);
    add(rest, floats_of(run.server_errors[own]), 1, static_cast<size_t>(run.served[own].begin));
    for (int64_t call = 0; call < calls; ++call) {
      const std::vector<float>& values = brought[own][static_cast<size_t>(call)];
      add(rest, values, -share);
      drift.norms += share * norm_of(values);
    }
  }
  drift.lost = norm_of(rest);
  return drift;
}

std::vector<CompressionOptions> both_scales() {
  const auto options = [](ScaleNorm norm, bool blocks) {
    return CompressionOptions().scale(norm).block_scales(blocks).compress_alone(true);
  };
  return {options(ScaleNorm::rms, false), options(ScaleNorm::l1, true)};
}

}  // namespace

TEST_CASE("P1: results and errors add up to the sum of means over 1,000 calls", "[collectives][onebit]") {
  double worst = 0;
  for (const Adversary& adversary : adversaries()) {
    for (const CompressionOptions& options : both_scales()) {
      // Two rows need two scales; elsewhere a few chunks are enough.
      const int64_t world_size = options.block_scales() ? 2 : 3, size = options.block_scales() ? 2200 : 700;
      const Drift drift = drift_of(world_size, size, options, 1000, inputs_of(adversary, size));
      INFO(adversary.name << ", blocks " << options.block_scales() << ": lost " << drift.lost << " of "
                          << drift.norms);
      CHECK(drift.lost <= 1e-5 * drift.norms);
      if (drift.norms > 0) worst = std::max(worst, drift.lost / drift.norms);
    }
  }
  std::printf("compressed mean: lost at most %.2g of the summed norms in 1,000 calls\n", worst);
}

TEST_CASE("P1: where errors are fp32 numbers, results and errors add up exactly", "[collectives][onebit]") {
  // Mean magnitudes of two elements: each call makes the errors' last bit at most two places finer, and ten
  // calls fit into an fp32 number.
  for (const int64_t world_size : {1, 2, 4}) {
    const auto options = CompressionOptions().scale(ScaleNorm::l1).compress_alone(true);
    const auto inputs = [](int64_t rank, int64_t call) {
      Samples integers(static_cast<uint64_t>(call * 8 + rank));
      std::vector<float> values(2);
      for (float& value : values) value = static_cast<float>(integers.below(9) - 4);
      return values;
    };
    for (const int64_t calls : {1, 2, 3, 5, 10}) {
      const Drift drift = drift_of(world_size, 2, options, calls, inputs);
      INFO(world_size << " ranks, " << calls << " calls");
      REQUIRE(drift.lost == 0);
    }
    // One element is its own scale: no error at all, for as long as one likes.
    const auto alone = [&](int64_t rank, int64_t call) { return std::vector<float>{inputs(rank, call)[0]}; };
    for (const CompressionOptions& any : both_scales()) {
      REQUIRE(drift_of(world_size, 1, any, 300, alone).lost == 0);
    }
  }
}

TEST_CASE("the textbook in fp64 loses nothing, and one fp32 call stays close to it",
          "[collectives][onebit]") {
  constexpr int64_t kWorld = 3, kSize = 900;
  for (const Adversary& adversary : adversaries()) {
    for (const CompressionOptions& options : both_scales()) {
      INFO(adversary.name << ", blocks " << options.block_scales());
      const auto inputs = inputs_of(adversary, kSize);
      OneBitTextbook<double> exact(rules_for(kWorld, kSize, options));
      OneBitTextbook<float> rounded(rules_for(kWorld, kSize, options));
      std::vector<double> rest(static_cast<size_t>(exact.length()), 0.0);
      double norms = 0;
      for (int64_t call = 0; call < 100; ++call) {
        std::vector<std::vector<double>> doubles;
        std::vector<std::vector<float>> floats;
        for (int64_t rank = 0; rank < kWorld; ++rank) {
          floats.push_back(inputs(rank, call));
          doubles.emplace_back(floats.back().begin(), floats.back().end());
          add(rest, doubles.back(), -1.0 / kWorld);
          norms += norm_of(doubles.back()) / kWorld;
        }
        // From the same errors: the scale may differ by rounding, a sign only where the number is nearly
        // zero.
        OneBitTextbook<double> same_errors(rules_for(kWorld, kSize, options));
        for (size_t rank = 0; rank < kWorld; ++rank) {
          std::copy(rounded.worker_errors[rank].begin(), rounded.worker_errors[rank].end(),
                    same_errors.worker_errors[rank].begin());
        }
        std::copy(rounded.server_error.begin(), rounded.server_error.end(), same_errors.server_error.begin());
        const auto near = same_errors.reduce(doubles);
        const auto mean = rounded.reduce(floats);
        int64_t other_signs = 0;
        for (size_t i = 0; i < mean.size(); ++i) {
          const double far = std::abs(std::abs(static_cast<double>(mean[i])) - std::abs(near[i]));
          if (far > 2e-6 * std::abs(near[i])) FAIL("element " << i << ": " << mean[i] << ", not " << near[i]);
          if (std::signbit(mean[i]) == std::signbit(near[i])) continue;
          // Its error and what was sent give the number that was rounded to a sign.
          const double number = near[i] + same_errors.server_error[i];
          if (std::abs(number) > 1e-4 * std::abs(near[i])) ++other_signs;
        }
        CHECK(other_signs == 0);
        add(rest, exact.reduce(doubles), 1);
      }
      for (const auto& error : exact.worker_errors) add(rest, error, 1.0 / kWorld);
      add(rest, exact.server_error, 1);
      CHECK(norm_of(rest) <= 1e-13 * norms);
    }
  }
}

TEST_CASE("P2: scales count real elements only, for 1 to 1,025 elements on 1 to 8 ranks",
          "[collectives][onebit]") {
  for (const CompressionOptions& options : both_scales()) {
    for (int world_size = 1; world_size <= 8; ++world_size) {
      const auto world = Communicator::in_process(world_size);
      const auto sizes = sizes_for(world_size);
      std::vector<std::vector<at::Tensor>> means(world.size());  // [rank][number of the size]
      // Rank r brings +-(r + 1) with signs that all ranks share: the mean of magnitudes is (W + 1) / 2.
      const auto numbers = [](int64_t rank, int64_t size) {
        auto values = random_inputs(3, size)(0, size);
        for (float& value : values) value = std::copysign(static_cast<float>(rank + 1), value);
        return values;
      };
      const auto messages = run_ranks(world_size, [&](int rank) {
        const auto own = static_cast<size_t>(rank);
        for (const int64_t size : sizes) {
          CompressedAllReduce mean(world[own], size, options);
          mean.reduce(means[own].emplace_back(tensor_of(numbers(rank, size))));
        }
      });
      REQUIRE(first_of(messages) == "");
      const bool is_exact = (world_size & (world_size - 1)) == 0;
      for (size_t number = 0; number < sizes.size(); ++number) {
        const int64_t size = sizes[number];
        INFO(world_size << " ranks, " << size << " elements, blocks " << options.block_scales());
        const at::Tensor& mean = means[0][number];
        const auto signs = numbers(0, size);
        const double expected = (world_size + 1) / 2.0;
        double furthest = 0;
        for (size_t i = 0; i < signs.size(); ++i) {
          const double value = mean.const_data_ptr<float>()[i];
          furthest = std::max(furthest, std::abs(value - std::copysign(expected, signs[i])));
        }
        // One element too many in any count would be a change of 4e-4.
        REQUIRE(furthest <= (is_exact ? 0.0 : 5e-7 * expected));
        for (const auto& other : means) REQUIRE(same_bits(other[number], mean));
      }
    }
  }
}

TEST_CASE("P3: the same run gives the same bits, whatever the number of threads", "[collectives][onebit]") {
  const int threads = at::get_num_threads();
  constexpr int64_t kSize = 100001;
  for (const CompressionOptions& options : both_scales()) {
    for (const int world_size : {1, 2, 4}) {
      const auto inputs = random_inputs(3, kSize);
      std::vector<std::vector<float>> numbers;
      for (int64_t rank = 0; rank < world_size; ++rank) numbers.push_back(inputs(rank, 0));
      const auto run = [&](int count) {
        at::set_num_threads(count);
        return run_onebit(Communicator::in_process(world_size), kSize, options, 0, 10,
                          [&](int64_t rank, int64_t) { return numbers[static_cast<size_t>(rank)]; });
      };
      const auto first = run(1);
      for (const int count : {1, 1, 3}) {
        const auto again = run(count);
        INFO(world_size << " ranks, " << count << " threads");
        REQUIRE(first_of(again.messages) == "");
        for (size_t rank = 0; rank < again.means.size(); ++rank) {
          REQUIRE(same_bits(again.means[rank], first.means[0]));
        }
        REQUIRE(same_bits(again.worker_errors, first.worker_errors));
        REQUIRE(same_bits(again.server_errors, first.server_errors));
      }
    }
  }
  at::set_num_threads(threads);
}

}  // namespace pacer::testing::compressed_mean_properties
