// The 1-bit all-reduce as a textbook has it: both errors are stored, signs are numbers, nothing is packed,
// and the ranks are a loop. Written from the definition alone, for any real type: in fp32 the fast path must
// agree to the bit, in fp64 it shows what rounding has cost. And the same calls made by threads as ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "support/collectives/ranks.h"
#include "support/samples.h"

namespace pacer::testing {

struct OneBitRules {
  int64_t world_size = 1;
  std::vector<int64_t> counts;  // elements of each tensor
  bool l1 = false;
  bool block_scales = false;
  int64_t alignment = 128;
};

template <class Real>
class OneBitTextbook {
 public:
  using Numbers = std::vector<Real>;

  explicit OneBitTextbook(const OneBitRules& rules) : rules_(rules) {
    for (const int64_t count : rules.counts) {
      is_real_.insert(is_real_.end(), static_cast<size_t>(count), 1);
      while (is_real_.size() % 128 != 0) is_real_.push_back(0);
    }
    while (chunk_ * rules.world_size < length()) chunk_ += rules.alignment;
    worker_errors.assign(static_cast<size_t>(rules.world_size), Numbers(is_real_.size(), Real(0)));
    server_error.assign(is_real_.size(), Real(0));
  }

  int64_t length() const { return static_cast<int64_t>(is_real_.size()); }
  int64_t chunk() const { return chunk_; }

  // inputs[i]: rank i's numbers, from the start of the buffer; what is missing at the end is padding. Returns
  // the mean of all ranks, `length()` numbers.
  Numbers reduce(const std::vector<Numbers>& inputs) {
    Numbers mean(is_real_.size());
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      Numbers& error = worker_errors[rank];
      Numbers carried(is_real_.size(), Real(0));
      for (size_t i = 0; i < inputs[rank].size(); ++i) {
        if (is_real_[i]) carried[i] = inputs[rank][i] + error[i];
      }
      for (const auto& [begin, end] : blocks_of(0, length())) {
        const Real scale = scale_of(carried, begin, end);
        const Real weight = scale * static_cast<Real>(1.0 / static_cast<double>(rules_.world_size));
        for (size_t i = begin; i < end; ++i) {
          if (!is_real_[i]) continue;
          error[i] = carried[i] - scale * sign_of(carried[i]);
          const Real term = weight * sign_of(carried[i]);
          mean[i] = rank == 0 ? term : mean[i] + term;
        }
      }
    }
    for (int64_t begin = 0; begin < length(); begin += chunk_) serve(begin, mean);
    return mean;
  }

  // Of each rank, and of the server of each element.
  std::vector<Numbers> worker_errors;
  Numbers server_error;

  // In the one order of additions; every level of the sum is an array of its own.
  double sum_of(const Numbers& values, size_t begin, size_t end) const {
    std::vector<double> units;
    for (size_t unit = begin; unit < end; unit += 32768) {
      Numbers columns(2048, Real(0));
      for (size_t i = unit; i < std::min(end, unit + 32768); ++i) {
        Real& column = columns[(i - unit) % 2048];
        column = rules_.l1 ? column + std::abs(values[i]) : std::fma(values[i], values[i], column);
      }
      Numbers fours(512);
      for (size_t i = 0; i < 512; ++i) {
        fours[i] = (columns[4 * i] + columns[4 * i + 1]) + (columns[4 * i + 2] + columns[4 * i + 3]);
      }
      units.push_back(static_cast<double>(sum_of_halves(fours)));
    }
    std::vector<double> columns(256, 0.0);
    for (size_t i = 0; i < units.size(); ++i) columns[i % 256] += units[i];
    return sum_of_halves(columns);
  }

 private:
  static Real sign_of(Real value) { return value < 0 ? Real(-1) : Real(1); }

  template <class Number>
  static Number sum_of_halves(std::vector<Number> level) {
    while (level.size() > 1) {
      const size_t half = level.size() / 2;
      std::vector<Number> next(half);
      for (size_t i = 0; i < half; ++i) next[i] = level[i] + level[i + half];
      level = next;
    }
    return level[0];
  }

  // Elements [begin, end) that share a scale.
  struct Block {
    size_t begin, end;
  };
  std::vector<Block> blocks_of(int64_t begin, int64_t end) const {
    const int64_t width = rules_.block_scales ? 2048 : end - begin;
    std::vector<Block> blocks;
    for (; begin < end; begin += width) {
      blocks.push_back({static_cast<size_t>(begin), static_cast<size_t>(std::min(end, begin + width))});
    }
    return blocks;
  }

  Real scale_of(const Numbers& values, size_t begin, size_t end) const {
    double count = 0;
    for (size_t i = begin; i < end; ++i) count += is_real_[i] ? 1 : 0;
    if (count == 0) return 0;
    const double mean = sum_of(values, begin, end) / count;
    return static_cast<Real>(rules_.l1 ? mean : std::sqrt(mean));
  }

  // The chunk that begins here: from the mean of what the workers sent to what everyone receives.
  void serve(int64_t chunk_begin, Numbers& mean) {
    const int64_t chunk_end = std::min(length(), chunk_begin + chunk_);
    for (int64_t at = chunk_begin; at < chunk_end; ++at) {
      const auto i = static_cast<size_t>(at);
      mean[i] = is_real_[i] ? mean[i] + server_error[i] : Real(0);
    }
    for (const auto& [begin, end] : blocks_of(chunk_begin, chunk_end)) {
      const Real scale = scale_of(mean, begin, end);
      for (size_t i = begin; i < end; ++i) {
        if (!is_real_[i]) continue;
        const Real sent = scale * sign_of(mean[i]);
        server_error[i] = mean[i] - sent;
        mean[i] = sent;
      }
    }
  }

  OneBitRules rules_;
  std::vector<char> is_real_;
  int64_t chunk_ = 0;
};

inline OneBitRules rules_for(int64_t world_size, int64_t size, const CompressionOptions& options) {
  OneBitRules rules;
  rules.world_size = world_size;
  rules.counts = {size};
  rules.l1 = options.scale() == ScaleNorm::l1;
  rules.block_scales = options.block_scales();
  rules.alignment = options.alignment().value_or(rules.block_scales ? 2048 : 128);
  return rules;
}

inline at::Tensor tensor_of(const std::vector<float>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}

// The tensor has the bits of the values from `begin` on.
inline bool has_bits_of(const at::Tensor& tensor, const std::vector<float>& values, int64_t begin = 0) {
  const auto bytes = static_cast<size_t>(tensor.nbytes());
  return tensor.numel() + begin <= static_cast<int64_t>(values.size()) &&
         (bytes == 0 || std::memcmp(tensor.const_data_ptr<float>(), values.data() + begin, bytes) == 0);
}

// What rank `rank` brings to call number `call`.
using OneBitInputs = std::function<std::vector<float>(int64_t rank, int64_t call)>;

// Numbers as they may come: of like size, of all sizes (whose squares still are fp32 numbers), or mostly
// zeros of either sign; another sequence for each seed.
inline OneBitInputs random_inputs(uint64_t seed, int64_t size) {
  return [=](int64_t rank, int64_t call) {
    Samples samples(seed * 1000003 + static_cast<uint64_t>(call * 64 + rank));
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) {
      double magnitude = samples.uniform();
      if (seed % 3 == 1) magnitude = std::ldexp(1 + magnitude, static_cast<int>(samples.below(81)) - 40);
      if (seed % 3 == 2 && samples.chance(0.7)) magnitude = 0;
      value = static_cast<float>(samples.sign() * magnitude);
    }
    return values;
  };
}

// What threads as ranks saw of consecutive calls of one CompressedAllReduce.
struct OneBitRun {
  std::vector<std::string> messages;                     // [rank], "" where nothing was thrown
  std::vector<std::vector<at::Tensor>> means;            // [rank][call]
  std::vector<at::Tensor> worker_errors, server_errors;  // [rank], after the last call
  std::vector<CompressedAllReduce::Range> served;        // [rank]
};

// `prepare`, where given, is called with each rank's new object before the first call.
inline OneBitRun run_onebit(const Ranks& world, int64_t size, const CompressionOptions& options,
                            int64_t first_call, int64_t end_call, const OneBitInputs& inputs,
                            const std::function<void(CompressedAllReduce&, size_t)>& prepare = {}) {
  OneBitRun run;
  run.means.resize(world.size());
  run.worker_errors.resize(world.size());
  run.server_errors.resize(world.size());
  run.served.resize(world.size());
  run.messages = run_ranks(static_cast<int>(world.size()), [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    CompressedAllReduce mean(world[own], size, options);
    if (prepare) prepare(mean, own);
    for (int64_t call = first_call; call < end_call; ++call) {
      const at::Tensor buffer = tensor_of(inputs(rank, call));
      mean.reduce(buffer);
      run.means[own].push_back(buffer);
    }
    run.worker_errors[own] = mean.worker_error();
    run.server_errors[own] = mean.server_error();
    run.served[own] = mean.served();
  });
  return run;
}

}  // namespace pacer::testing
